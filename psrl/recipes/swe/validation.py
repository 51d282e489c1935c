"""Problems whose tests say what they should: with the gold patch they are resolved, and with nothing changed they are not.

Each is run `k` times both ways, for real. Verdicts are kept beside the output, so that a validation that was interrupted goes on.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Coroutine, Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, TypeVar

from psrl.errors import EnvironmentFault, RewardError, RowError, SandboxError
from psrl.swe.verdict import GradeReport, TestReport, judge
from psrl.telemetry.progress import ProgressLine
from psrl.types import SweProblem

T = TypeVar("T")


class Grader(Protocol):
    """What is asked of `rewards.execution.ProjectGrader`."""

    async def grade(self, problem: SweProblem, patch: str) -> GradeReport:
        """The verdict on a patch."""

    async def run_tests(self, problem: SweProblem, patch: str) -> TestReport:
        """What the tests say with it; an empty one changes nothing."""


class Verdict(StrEnum):
    """What a validation says of a problem; everything but `good` is a reason to leave it out."""

    GOOD = "good"
    GOLD_NOT_RESOLVED = "gold_not_resolved"
    """The gold patch never resolves it."""
    GOLD_FLAKY = "gold_flaky"
    """The gold patch resolves it sometimes."""
    NULL_RESOLVED = "null_resolved"
    """Its tests always pass with nothing changed: there is no bug that they see."""
    NULL_FLAKY = "null_flaky"
    """Its tests sometimes pass with nothing changed."""


class Validator:
    """Validates problems, a few at once."""

    def __init__(self, grader: Grader, *, k: int, num_at_once: int, cache: Path) -> None:
        """`cache` is the file of verdicts, a JSON line each; it is made where it is missing."""
        self._grader = grader
        self._k = k
        self._free = asyncio.Semaphore(num_at_once)
        self._cache = cache
        self._known = _read_cache(cache)

    async def run(self, problems: Sequence[SweProblem]) -> tuple[list[SweProblem], list[RowError]]:
        """(good problems in their order, why the others are left out)."""
        progress = ProgressLine("validated", len(problems))
        num_left_out = 0

        async def one(problem: SweProblem) -> RowError | None:
            nonlocal num_left_out
            async with self._free:
                error = await self._reason(problem)
            num_left_out += error is not None
            progress.done(f"{num_left_out} left out")
            return error

        errors = await all_of(one(problem) for problem in problems)
        good = [problem for problem, error in zip(problems, errors, strict=True) if error is None]
        return good, [error for error in errors if error is not None]

    async def _reason(self, problem: SweProblem) -> RowError | None:
        key = _key_of(problem, self._k)
        if key not in self._known:
            try:
                verdict, detail = await self._verdict(problem)
            except (SandboxError, EnvironmentFault, RewardError) as error:
                # Says nothing of the problem for good, so that it is not kept: the next validation tries again.
                return _left_out(problem, "cannot_be_run", f"{type(error).__name__}: {error}")
            self._known[key] = (verdict, detail)
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            with self._cache.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"key": key, "instance_id": problem.instance_id, "verdict": verdict, "detail": detail}) + "\n")
        verdict, detail = self._known[key]
        return None if verdict is Verdict.GOOD else _left_out(problem, verdict, detail)

    async def _verdict(self, problem: SweProblem) -> tuple[Verdict, str]:
        """The gold patch first: a problem that it does not resolve needs no further run."""
        golds: list[GradeReport] = []
        for _ in range(self._k):
            golds.append(await self._grader.grade(problem, problem.gold_patch))
        num_resolved = sum(report.is_resolved for report in golds)
        if num_resolved < self._k:
            failed = next(report for report in golds if not report.is_resolved)
            verdict = Verdict.GOLD_FLAKY if num_resolved else Verdict.GOLD_NOT_RESOLVED
            return verdict, f"resolved {num_resolved} of {self._k} times; {failed.cause}: {failed.detail}"[:2000]
        nulls: list[GradeReport] = []
        for _ in range(self._k):
            nulls.append(judge(problem, await self._grader.run_tests(problem, "")))
        num_resolved = sum(report.is_resolved for report in nulls)
        if num_resolved:
            verdict = Verdict.NULL_RESOLVED if num_resolved == self._k else Verdict.NULL_FLAKY
            return verdict, f"passed {num_resolved} of {self._k} times with nothing changed"
        return Verdict.GOOD, ""


async def all_of(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; the first failure ends the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    return [task.result() for task in tasks]


def _left_out(problem: SweProblem, reason: str, detail: str) -> RowError:
    return RowError(source=problem.instance_id, row=-1, reason=reason, detail=detail)


def _key_of(problem: SweProblem, k: int) -> str:
    """Of everything that a verdict depends on: a changed problem is validated again."""
    text = json.dumps({**problem.to_row(), "k": k}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _read_cache(cache: Path) -> dict[str, tuple[Verdict, str]]:
    """Lines that a crash cut are left out."""
    known: dict[str, tuple[Verdict, str]] = {}
    for line in cache.read_text(encoding="utf-8").splitlines() if cache.is_file() else ():
        try:
            entry = json.loads(line)
            known[entry["key"]] = (Verdict(entry["verdict"]), entry["detail"])
        except (ValueError, KeyError, TypeError):
            continue
    return known
