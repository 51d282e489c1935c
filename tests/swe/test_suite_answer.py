"""What the runner prints is read whole, or for what it is: an end of its own, an error of the sandbox, or tampering."""

import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shop_project import problem

from psrl.errors import EnvironmentFault
from psrl.swe.pytest_settings import PytestSettings
from psrl.swe.suite_run import read_answer, run_order, targets_of
from psrl.types import CommandResult

ORDER = run_order(problem(), targets=(), added_lines={}, changes=(), settings=PytestSettings())
GOOD = {
    "ready": True, "late": False, "final": ["0", "2", "2"], "tampering": [], "statuses": {"t.py::a": "ppp"}, "failures": {},
    "broken_files": {}, "output": "", "tests_s": 0.1,
}  # fmt: skip


def read(exit_code=0, stderr=b"", killed_by=None, secret=ORDER.secret, **changes):
    body = json.dumps({**GOOD, **changes}).encode()
    stdout = body + b"\n" + hashlib.blake2b(body, key=secret).hexdigest().encode() + b"\n" if not stderr and killed_by is None else b""
    return read_answer(CommandResult(stdout=stdout, stderr=stderr, exit_code=exit_code, killed_by=killed_by), ORDER)


def test_a_whole_answer_is_a_report():
    report = read()
    assert (report.end, {name: str(status) for name, status in report.statuses.items()}) == ("complete", {"t.py::a": "passed"})


@pytest.mark.parametrize(
    "odd",
    [
        {"final": []}, {"final": ["0"]}, {"final": ["0", "1", "2", "3"]}, {"final": ["0", "x", "x"]}, {"final": ["0", "²", "²"]},
        {"final": [0, 1, 1]}, {"statuses": {"a": ""}}, {"statuses": {"a": "pp"}}, {"statuses": {"a": "pppp"}}, {"statuses": {"a": "pyp"}},
        {"statuses": {"a": None}}, {"failures": {"a": 1}}, {"broken_files": {"a": None}},
    ],
)  # fmt: skip
def test_fields_that_no_test_gives_are_tampering_and_no_error(odd):
    assert read(**odd).end == "tampered"


texts = st.text(max_size=5)


@given(st.none() | st.lists(texts, max_size=5), st.dictionaries(texts, texts, max_size=3), st.dictionaries(texts, texts, max_size=3))
def test_no_answer_of_a_runner_that_was_ready_is_an_error(final, statuses, failures):
    assert read(final=final, statuses=statuses, failures=failures).end in ("complete", "no_report", "tampered")


def test_a_run_that_was_tampered_with_before_it_was_ready_is_tampered():
    assert read(ready=False, tampering=["something else wrote to the report"]).end == "tampered"


CRASH = b'Traceback (most recent call last):\n  File "<psrl>", line 252, in %s\nIndexError: list index out of range\n'


@pytest.mark.parametrize("where", [b"listen_to", b"canary_faults"])
def test_a_runner_that_fails_on_what_the_tests_process_said_was_tampered_with(where):
    assert read(exit_code=1, stderr=CRASH % where).end == "tampered"


@pytest.mark.parametrize(
    "ended", [{"exit_code": 1, "stderr": CRASH % b"run_child"}, {"exit_code": 127, "stderr": b"python3: not found"}, {"ready": False}]
)
def test_a_runner_that_cannot_begin_is_an_error(ended):
    with pytest.raises(EnvironmentFault):
        read(**ended)


def test_an_answer_that_another_signed_is_no_report():
    assert read(secret=b"x" * 32).end == "no_report"


@pytest.mark.parametrize(("killed_by", "end"), [("wall_time", "timeout"), ("cpu_time", "timeout"), ("memory", "no_report")])
def test_a_runner_that_was_ended_says_why(killed_by, end):
    assert read(exit_code=None, killed_by=killed_by).end == end


def test_a_row_s_test_patch_that_is_no_diff_is_the_row_s_fault():
    with pytest.raises(EnvironmentFault, match="test patch of shop-1 is no diff"):
        targets_of(problem(test_patch="no diff"), None)
