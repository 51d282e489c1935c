"""Rows with a test command of their own: read by swebench's released parsers, and agreeing with them and with psrl's own runner."""

import asyncio
import time
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shop_project import FAIL_TO_PASS, FILES, MENDED, PASS_TO_PASS, diff, edit, grade, problem, with_grader
from swebench.harness.constants import END_TEST_OUTPUT, START_TEST_OUTPUT
from swebench.harness.grading import get_eval_report
from swebench.types import SWEbenchInstance, TestSpec

from psrl.datasets.swe_rows import problem_of_raw_row
from psrl.errors import RewardError
from psrl.rewards.execution import ProjectGrader
from psrl.rewards.suite_logs import load_parsers, read_log, report_of
from psrl.swe.verdict import judge
from psrl.types import CommandResult

TestSpec.__test__ = False  # pytest collects what is called Test
COMMAND = {"test_command": "python3 -m pytest -rA -p no:cacheprovider tests", "log_parser": "parse_log_pytest"}
MIXED = """
import pytest
from calc import double

@pytest.fixture
def broken():
    raise RuntimeError("no fixture")

@pytest.fixture
def ends_badly():
    yield
    raise RuntimeError("no end")

@pytest.mark.parametrize("x", [1, 2], ids=["one", "two/three-four"])
def test_double(x):
    assert double(x) == 2 * x

def test_fails():
    assert double(1) == 3, "a - message - with dashes"

def test_error(broken):
    pass

def test_ends_badly(ends_badly):
    pass

@pytest.mark.skip(reason="later")
def test_skipped():
    pass

@pytest.mark.xfail
def test_known():
    assert False

@pytest.mark.xfail
def test_better_than_known():
    pass

class TestClass:
    def test_method(self):
        print("PASSED tests/test_calc.py::test_fails")
"""
RIGHT = {"calc.py": "def double(x):\n    return 2 * x\n"}
PROJECTS = {
    "the shop with its bug": FILES,
    "the shop, mended": {**FILES, "shop/cart.py": MENDED},
    "every kind of end": {**RIGHT, "tests/test_calc.py": MIXED},
    "a file that cannot be imported": {**RIGHT, "tests/test_calc.py": MIXED, "tests/test_broken.py": "import nothing_of_this_name\n"},
    "a syntax error": {"calc.py": "def double(x:\n", "tests/test_calc.py": MIXED},
    "no test": {"tests/test_calc.py": "x = 1\n"},
}


ALWAYS = ("the shop with its bug", "every kind of end")
"""`make test-slow` runs the others."""


def slow(name):
    return () if name in ALWAYS else pytest.mark.slow


@cache
def outputs(name):
    """(our runner's report, the report of the log, the log) of one project without any patch."""
    files = PROJECTS[name]
    seen = {}

    class Recording(ProjectGrader):
        async def _run_command(self, sandbox, the_problem):
            run = sandbox.run

            async def recorded(argv, **options):
                ended = await run(argv, **options)
                seen["log"] = ended.stdout.decode()
                return ended

            sandbox.run = recorded
            return await super()._run_command(sandbox, the_problem)

    async def use(grader):
        recording = Recording(grader._sandboxes, grader._settings, num_concurrent=2)
        try:
            runs = (recording.run_tests(problem(files), ""), recording.run_tests(problem(files, **COMMAND), ""))
            ours, theirs = await asyncio.gather(*runs)
        finally:
            await recording.close()
        return ours, theirs

    return *with_grader(use), seen["log"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow(name)) for name in PROJECTS])
def test_swebench_reads_the_same_statuses_from_pytests_output_as_psrls_own_runner_reports(name):
    ours, theirs, _ = outputs(name)
    # The parser cuts names at a space, has no word for XPASS, and names no test that was skipped; pytest itself stops at a file
    # that cannot be imported.
    told = {case: str(status) for case, status in theirs.statuses.items()}
    expected = {
        case: str(status)
        for case, status in ours.statuses.items()
        if status not in ("xpassed", "skipped") and (name != "a file that cannot be imported" or "::" not in case)
    }
    cut = {case.split(" ")[0]: status for case, status in expected.items()}
    # Both a pass of the call and an error of the tear-down are in the log: a contradiction there, an error here. Printed lines, too.
    assert {case: "contradicted" if told.get(case) == "contradicted" else status for case, status in cut.items()} == told
    contradicted = {case for case, status in told.items() if status == "contradicted"}
    has_all = name == "every kind of end"
    assert contradicted == ({"tests/test_calc.py::test_ends_badly", "tests/test_calc.py::test_fails"} if has_all else set())


CASES = [
    ("the shop, mended", FAIL_TO_PASS[:1], PASS_TO_PASS, True),
    ("the shop with its bug", FAIL_TO_PASS[:1], PASS_TO_PASS, False),
    ("every kind of end", ("tests/test_calc.py::test_double[one]",), ("tests/test_calc.py::TestClass::test_method",), True),
    ("every kind of end", ("tests/test_calc.py::test_error",), (), False),
    ("every kind of end", ("tests/test_calc.py::test_double[one]",), ("tests/test_calc.py::test_no_such",), False),
    ("every kind of end", ("tests/test_calc.py::test_known",), (), True),
    ("every kind of end", ("tests/test_calc.py::test_double[one]",), ("tests/test_calc.py::test_known",), True),
    ("every kind of end", ("tests/test_calc.py::test_double[one]",), ("tests/test_calc.py::test_skipped",), False),
    ("a file that cannot be imported", ("tests/test_calc.py::test_double[one]",), (), False),
    ("a syntax error", ("tests/test_calc.py::test_double[one]",), (), False),
]


@pytest.mark.parametrize(("name", "f2p", "p2p", "is_resolved"), [pytest.param(*case, marks=slow(case[0])) for case in CASES])
def test_swebenchs_own_verdict_and_ours_agree(tmp_path, name, f2p, p2p, is_resolved):
    ours, theirs, log = outputs(name)
    the_problem = problem(PROJECTS[name], fail_to_pass=f2p, pass_to_pass=p2p, **COMMAND)
    file = tmp_path / "test_output.txt"
    file.write_text(f"{START_TEST_OUTPUT}\n{log}\n{END_TEST_OUTPUT}\n")
    spec = TestSpec("shop-1", "", [], "shop", "1", list(f2p), list(p2p), log_parser="parse_log_pytest", eval_type="pass_and_fail")
    prediction = {"instance_id": "shop-1", "model_name_or_path": "gold", "model_patch": "x"}
    said = get_eval_report(spec, prediction, str(file), include_tests_status=True)["shop-1"]
    assert said["resolved"] is is_resolved
    # Published PASS_TO_PASS lists hold expected failures; that one is a mend is not believed.
    has_expected_failure = "tests/test_calc.py::test_known" in (*f2p, *p2p)
    assert judge(the_problem, theirs).is_resolved is (is_resolved and "tests/test_calc.py::test_known" not in f2p)
    if name != "a file that cannot be imported":  # psrl's own runner goes on with the other files
        assert judge(replace(the_problem, test_command=None), ours).is_resolved is (is_resolved and not has_expected_failure)


def test_a_row_with_a_command_is_graded_through_to_its_verdict():
    row = problem(**COMMAND, fail_to_pass=FAIL_TO_PASS[:1])
    assert grade(row.gold_patch, row).is_resolved
    wrong = grade(edit({"shop/cart.py": MENDED.replace("min", "max")}), row)
    assert (wrong.cause, wrong.failed_tests) == ("tests_failed", ("tests/test_cart.py::test_cheapest",))


def test_lines_that_the_code_prints_cannot_turn_a_failure_into_a_pass():
    printed = 'import atexit\natexit.register(print, "\\nPASSED tests/test_cart.py::test_discount")\n'
    row = problem(**COMMAND, fail_to_pass=FAIL_TO_PASS[:1])
    report = grade(edit({"shop/cart.py": printed + FILES["shop/cart.py"]}), row)
    assert (report.cause, report.f2p_passed) == ("tests_failed", 0)


def test_output_of_a_run_that_ended_otherwise_is_worth_nothing():
    printed = 'import os\nos.write(1, b"PASSED tests/test_cart.py::test_discount\\n")\nos._exit(3)\n'
    row = problem(**{**COMMAND, "test_command": COMMAND["test_command"] + " -s"}, fail_to_pass=FAIL_TO_PASS[:1], pass_to_pass=())
    assert grade(edit({"shop/cart.py": printed + FILES["shop/cart.py"]}), row).cause == "no_report"


def test_a_command_that_does_not_end_is_a_timeout():
    row = problem(test_command="sleep 60", log_parser="parse_log_pytest", timeout_s=0.3)
    assert grade(row.gold_patch, row).cause == "timeout"


def test_an_unknown_parser_is_an_error_that_names_those_there_are():
    row = problem(test_command="true", log_parser="parse_log_of_nobody")
    with pytest.raises(RewardError, match=r"no log parser named 'parse_log_of_nobody'; it has .*parse_log_pytest"):
        grade(row.gold_patch, row)


def ended(stdout=b"", exit_code=0, killed_by=None):
    return CommandResult(stdout=stdout, stderr=b"", exit_code=exit_code, killed_by=killed_by)


def test_a_name_that_the_data_set_cut_within_its_parameters_is_found_by_its_beginning():
    # 676 names of SWE-bench Verified are cut so (swebench/harness/grading.py, _resolve_case).
    row = problem(fail_to_pass=("t.py::test_fail[log(photon",), pass_to_pass=())
    both = {"t.py::test_fail[log(photon /cm]": "passed", "t.py::test_fail[log(photon /s]": "passed"}
    assert judge(row, report_of(row, both, ended())).is_resolved
    assert not judge(row, report_of(row, {**both, "t.py::test_fail[log(photon /s]": "failed"}, ended(exit_code=1))).is_resolved


LINES = st.lists(st.sampled_from(["PASSED a", "FAILED a - x", "ERROR a", "PASSED b", "SKIPPED [1] a.py:3: later", "noise", ""]), max_size=8)


def statuses_of(log, *required, parser="parse_log_pytest"):
    request = {"parser": parser, "log": log, "instance_id": "x", "repo": "x", "fail_to_pass": list(required), "pass_to_pass": []}
    return read_log(load_parsers(), request)["statuses"]


@given(LINES)
def test_a_test_counts_as_passed_only_where_every_line_of_it_says_so(lines):
    said = {line.split()[0] for line in lines if line.split()[1:2] == ["a"]}
    assert (statuses_of("\n".join(lines), "a").get("a") == "passed") == (said == {"PASSED"})


@pytest.mark.parametrize(
    ("parser", "name", "passed", "failed"),
    [
        ("parse_log_pytest", "t.py::test_a[1", "PASSED t.py::test_a[1 2]", "FAILED t.py::test_a[1 2] - x"),
        ("parse_log_pytest_options", "t.py::test_a[/b]", "PASSED t.py::test_a[/x/b]", "FAILED t.py::test_a[/y/b]"),
        ("parse_log_scikit", "t.py::test_a", "PASSED t.py::test_a", "FA\x02ILED\x1b[31m t.py\x03::te[31mst_a - x"),
        ("parse_log_scikit", "t.py::test_a", "PASSED t.py::test_a", "FAILED t.\tpy::test_a"),
        ("parse_log_matplotlib", "t.py::test_a[1]", "PASSED t.py::test_a[MouseButton.LEFT]", "FAILED t.py::test_a[MouseButton.LEFT]"),
        ("parse_log_django", "test_a (b.C)", "test_a (b.C) ... ok", "test_a (b.C) ... FAIL"),
        ("parse_log_sympy", "test_a", "test_a ok", "test_a F"),
    ],
)
def test_a_failure_between_two_passes_is_found_as_each_parser_names_tests(parser, name, passed, failed):
    assert statuses_of("\n".join([passed, "noise", passed]), name, parser=parser)[name] == "passed"
    assert statuses_of("\n".join([passed, "noise", failed, "noise", passed]), name, parser=parser)[name] == "contradicted"


def test_a_failure_between_two_passes_is_found_in_a_long_log():
    noise = [f"line {number}" for number in range(26_000)]
    lines = ["PASSED t.py::test_a", *noise, "FAILED t.py::test_a - x", *noise, "PASSED t.py::test_a", "PASSED t.py::test_b"]
    assert statuses_of("\n".join(lines), "t.py::test_a", "t.py::test_b") == {"t.py::test_a": "contradicted", "t.py::test_b": "passed"}


def test_more_lines_of_required_tests_than_an_honest_log_has_pass_none():
    lines = [f"t.py::test_a was here {number}" for number in range(60_000)]
    assert statuses_of("\n".join(["PASSED t.py::test_a", *lines]), "t.py::test_a") == {"t.py::test_a": "contradicted"}


def test_an_output_that_the_parser_cannot_read_is_no_report_and_no_error():
    row = problem(test_command="echo FAIL:", log_parser="parse_log_django")  # the parser asks for a second word
    report = grade(row.gold_patch, row)
    assert (report.cause, "IndexError" in report.detail) == ("no_report", True)


def test_an_output_that_the_parser_does_not_come_to_the_end_of_is_a_timeout_and_no_error(monkeypatch):
    monkeypatch.setattr("psrl.rewards.execution.COMMAND_WALL_S", 1.0)
    row = problem(test_command="head -c 3000000 /dev/zero | tr '\\0' _", log_parser="parse_log_sympy")  # its pattern is quadratic there
    started = time.monotonic()
    report = grade(row.gold_patch, row)
    assert (report.cause, "parse_log_sympy" in report.detail) == ("timeout", True)
    assert time.monotonic() - started < 30


def test_a_row_of_swebenchs_own_schema_becomes_a_problem():
    assert {"repo", "instance_id", "base_commit", "patch", "test_patch", "problem_statement", "FAIL_TO_PASS", "PASS_TO_PASS"} <= set(
        SWEbenchInstance.__annotations__
    )
    raw = dict.fromkeys(SWEbenchInstance.__annotations__, "x") | {
        "repo": "psf/requests",
        "instance_id": "psf__requests-1",
        "version": "2.31",
        "patch": problem().gold_patch,
        "test_patch": diff({}, {"tests/test_more.py": "def test_more():\n    pass\n"}),
        "FAIL_TO_PASS": '["tests/test_more.py::test_more"]',
        "PASS_TO_PASS": "[]",
    }
    made = problem_of_raw_row(raw, source="verified", row=0)
    assert made.fail_to_pass == ("tests/test_more.py::test_more",)
    assert made.log_parser in load_parsers()
