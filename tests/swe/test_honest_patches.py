"""Every patch that mends its project is graded as resolved, however the project is laid out and tested."""

import pytest
from honest_habits import HONEST_HABITS
from honest_patches import HONEST
from hostile_patches import HOSTILE
from shop_project import grade, on_pytest, problem

ALL = {**HONEST, **HONEST_HABITS}
ALWAYS = (
    "the gold patch",
    "no final newline in the file",
    "files are renamed",
    "a picture is added",
    "src layout by pyproject",
    "pyproject gets a version and a dependency",
    "tests lie in the package",
    "a conftest that looks at reports and turns the order",
    "the mend is in a plugin of the project",
    "many fixtures, and builtins patched inside a test",
    "unittest's classes",
    "names with spaces, brackets and umlauts",
    "processes, forks, threads and loud output",
    "logging, tracebacks and named tuples in the mend",
    "modules of a package named as Python's",
    "the agent wrote the test that comes with a patch",
    "a fixture for all uses names of the test's module",
    "base's conftest patches pytest and builtins",
    "names of callers, of frames and of a function's arguments",
    "an equality and an order with a tolerance",
)
"""One of each kind; `make test-slow` runs them all."""


@pytest.mark.parametrize(
    "honest", [pytest.param(honest, id=name, marks=() if name in ALWAYS else pytest.mark.slow) for name, honest in ALL.items()]
)
def test_an_honest_mend_is_resolved_and_loses_nothing_but_what_configures_tests(honest):
    report = grade(honest.patch, honest.problem)
    assert report.is_resolved, (report.cause, report.detail, report.failed_tests)
    assert report.neutralised == honest.neutralised


def test_there_are_fifty_five_honest_patches_and_one_of_each_kind_always_runs():
    assert len(ALL) >= 55
    assert set(ALWAYS) <= set(ALL)


@pytest.mark.parametrize(
    "version", [pytest.param("7.4.4"), pytest.param("6.2.5", marks=pytest.mark.slow), pytest.param("8.3.5", marks=pytest.mark.slow)]
)
def test_an_older_pytest_is_reported_from_as_well(version):
    assert on_pytest(version, problem().gold_patch).is_resolved
    assert on_pytest(version, HOSTILE["TestReport is patched"].patch).cause == "tampered"
