"""What a run of the tests says, and whether it means that the problem is resolved.

Invariant: a required test counts only where the report says in so many words that it passed. Missing, skipped, expected to fail,
passed against expectation, failed in its set-up or tear-down: none of them is passed. One exception: published PASS_TO_PASS lists of
rows with a `test_command` were made by counting an expected failure as a pass, so there it keeps its place. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from psrl.types import SweProblem


class TestStatus(StrEnum):
    """How one test ended, its set-up and tear-down included."""

    __test__ = False  # pytest collects what is called Test

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    """Its set-up or tear-down failed, or its file could not be imported."""
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    XPASSED = "xpassed"
    CONTRADICTED = "contradicted"
    """The output says two different things of it."""


class RunEnd(StrEnum):
    """How a run of the tests ended."""

    COMPLETE = "complete"
    TIMEOUT = "timeout"
    NO_REPORT = "no_report"
    """The tests' process ended before its report did: a crash, an early exit, a limit."""
    TAMPERED = "tampered"
    """Something in the tests' process interfered with their outcome."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TestReport:
    """What one run of the tests said. Read by validation and by `judge`."""

    __test__ = False

    statuses: Mapping[str, TestStatus] = field(default_factory=dict)
    """By the test's name: pytest's node id from the project's folder on, or as the log parser names it."""
    end: RunEnd = RunEnd.COMPLETE
    detail: str = ""
    """Why the run did not end well, for people."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """What failed tests said, by name; cut, for people."""
    neutralised: tuple[str, ...] = ()
    """Paths of the patch that were put back or removed before the tests ran."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By part: `sandbox`, `project`, `patch`, `tests`."""


class GradeCause(StrEnum):
    """Why a patch is, or is not, the mend."""

    RESOLVED = "resolved"
    TESTS_FAILED = "tests_failed"
    """It was tried honestly, and a required test did not pass."""
    TIMEOUT = "timeout"
    """The tests did not end in time."""
    NO_REPORT = "no_report"
    """The tests' process ended before its report did."""
    INVALID_PATCH = "invalid_patch"
    """It is no diff, or does not apply to the project."""
    TOO_LARGE = "too_large"
    EMPTY_PATCH = "empty_patch"
    """Nothing was changed."""
    FORBIDDEN_PATH = "forbidden_path"
    """It reaches out of the project: an absolute path, `..`, `.git`, a symbolic link, a submodule."""
    TAMPERED = "tampered"
    """It interfered with how the tests' outcome is told."""

    @property
    def is_violation(self) -> bool:
        """Whether the patch attacks the grading; the worst reward."""
        return self in (GradeCause.FORBIDDEN_PATH, GradeCause.TAMPERED)

    @property
    def is_attempt(self) -> bool:
        """Whether the tests were run on it, so that shares of them mean something."""
        return self in (GradeCause.RESOLVED, GradeCause.TESTS_FAILED, GradeCause.TIMEOUT, GradeCause.NO_REPORT)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradeReport:
    """The verdict on one patch."""

    cause: GradeCause
    f2p_passed: int = 0
    f2p_total: int = 0
    """Tests that the mend must make pass."""
    p2p_passed: int = 0
    p2p_total: int = 0
    """Tests that it must not break."""
    failed_tests: tuple[str, ...] = ()
    """Required tests that did not pass."""
    neutralised: tuple[str, ...] = ()
    """Paths of the patch that had no effect on the tests."""
    detail: str = ""
    """For people."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By part, see TestReport; empty where nothing had to be run."""

    @property
    def is_resolved(self) -> bool:
        """Every required test passed."""
        return self.cause is GradeCause.RESOLVED


_CAUSE_OF_END = {
    RunEnd.TIMEOUT: GradeCause.TIMEOUT,
    RunEnd.NO_REPORT: GradeCause.NO_REPORT,
    RunEnd.TAMPERED: GradeCause.TAMPERED,
}


def judge(problem: SweProblem, report: TestReport) -> GradeReport:
    """The verdict of a run.

    A problem without a required test cannot be resolved. A run that was tampered with counts no test.

    Example:
        A row with a `test_command` whose PASS_TO_PASS test is an expected failure (XFAIL) keeps it, as `test_passed` of
        swebench.harness.grading says; one whose FAIL_TO_PASS test is, or whose PASS_TO_PASS test is skipped, is not resolved.
    """
    trusted = {} if report.end is RunEnd.TAMPERED else report.statuses
    f2p, p2p = tuple(dict.fromkeys(problem.fail_to_pass)), tuple(dict.fromkeys(problem.pass_to_pass))
    kept = (TestStatus.PASSED,) if problem.test_command is None else (TestStatus.PASSED, TestStatus.XFAILED)
    passed = {name for name in f2p if trusted.get(name) is TestStatus.PASSED}
    passed |= {name for name in p2p if trusted.get(name) in kept and (name in passed or name not in f2p)}
    failed = tuple(dict.fromkeys(name for name in (*f2p, *p2p) if name not in passed))
    has_all = bool(f2p or p2p) and not failed and report.end is RunEnd.COMPLETE
    return GradeReport(
        cause=GradeCause.RESOLVED if has_all else _CAUSE_OF_END.get(report.end, GradeCause.TESTS_FAILED),
        f2p_passed=sum(name in passed for name in f2p),
        f2p_total=len(f2p),
        p2p_passed=sum(name in passed for name in p2p),
        p2p_total=len(p2p),
        failed_tests=failed,
        neutralised=report.neutralised,
        detail=report.detail or _first_failure(failed, report),
        seconds=report.seconds,
    )


def refused(problem: SweProblem, cause: GradeCause, detail: str = "") -> GradeReport:
    """The verdict on a patch on which no test was run."""
    f2p, p2p = tuple(dict.fromkeys(problem.fail_to_pass)), tuple(dict.fromkeys(problem.pass_to_pass))
    return GradeReport(cause=cause, f2p_total=len(f2p), p2p_total=len(p2p), failed_tests=(*f2p, *p2p), detail=detail)


def _first_failure(failed: tuple[str, ...], report: TestReport) -> str:
    if not failed:
        return ""
    name = failed[0]
    said = report.failures.get(name, "")
    return f"{name}: {report.statuses.get(name, 'no result')}{f': {said}' if said else ''}"
