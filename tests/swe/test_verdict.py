"""A verdict follows from what a report says in so many words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shop_project import problem

from psrl.swe.suite_run import status_of
from psrl.swe.verdict import GradeCause, RunEnd, TestReport, TestStatus, judge, refused

NAMES = ("a", "b", "c")
TWO_AND_ONE = {"fail_to_pass": ("a", "b"), "pass_to_pass": ("c",)}
reports = st.builds(
    TestReport,
    statuses=st.dictionaries(st.sampled_from((*NAMES, "d")), st.sampled_from(TestStatus)),
    end=st.sampled_from(RunEnd),
)


@given(reports)
def test_resolved_means_that_each_required_test_is_said_to_have_passed_in_a_complete_run(report):
    graded = judge(problem(**TWO_AND_ONE), report)
    all_passed = all(report.statuses.get(name) == "passed" for name in NAMES)
    assert graded.is_resolved == (all_passed and report.end == "complete")
    assert (graded.f2p_total, graded.p2p_total) == (2, 1)
    if report.end == "tampered":
        assert (graded.f2p_passed, graded.p2p_passed, graded.cause) == (0, 0, "tampered")
    else:
        assert graded.f2p_passed + graded.p2p_passed == sum(report.statuses.get(name) == "passed" for name in NAMES)
    assert set(graded.failed_tests) <= set(NAMES)


def test_a_problem_without_a_required_test_cannot_be_resolved():
    assert judge(problem(fail_to_pass=(), pass_to_pass=()), TestReport()).cause is GradeCause.TESTS_FAILED


def test_a_test_that_is_named_twice_counts_once():
    graded = judge(problem(fail_to_pass=("a", "a"), pass_to_pass=()), TestReport(statuses={"a": TestStatus.PASSED}))
    assert (graded.f2p_passed, graded.f2p_total, graded.is_resolved) == (1, 1, True)


def test_a_refused_patch_passes_nothing():
    graded = refused(problem(**TWO_AND_ONE), GradeCause.TOO_LARGE, "why")
    assert (graded.f2p_passed, graded.f2p_total, graded.p2p_total, graded.failed_tests) == (0, 2, 1, NAMES)


STATUS_OF = {
    "ppp": "passed", "pfp": "failed", "f-p": "error", "ppf": "error", "pff": "error", "s-p": "skipped", "s-f": "error", "psp": "skipped",
    "pxp": "xfailed", "x-p": "xfailed", "pXp": "xpassed", "pp-": "error", "p-p": "error", "---": "error", "p?p": "error",
}  # fmt: skip


@pytest.mark.parametrize(("phases", "status"), STATUS_OF.items())
def test_the_three_phases_of_a_test_make_one_status(phases, status):
    assert status_of(phases) == status
