"""Grading of patches: a fresh sandbox, the patch on the project's base, the tests put back, and their report.

Invariant: nothing that the patch brought runs before the tests do, and what it may change of them is put back first. A verdict is a
`GradeReport`; whatever says nothing about the patch (a sandbox, a project that cannot be made ready, a runner that does not start) is an
error of its own class. docs/swe_grading.md says what is held off, and what is not.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from weakref import WeakValueDictionary

from psrl.config.reward import ExecutionConfig
from psrl.errors import RewardError, SandboxError
from psrl.protocols import Sandbox, Sandboxes
from psrl.rewards.patched_project import (
    COMMAND_WALL_S,
    PlaceFullError,
    apply_patch,
    apply_test_patch,
    put_back,
    pytest_settings,
    swells,
)
from psrl.rewards.suite_logs import LogParsers
from psrl.swe.patch import Change, CheckedPatch, PatchRefusedError, check_patch
from psrl.swe.project import prepare_project, sandbox_spec
from psrl.swe.pytest_settings import PytestSettings
from psrl.swe.suite_run import read_answer, run_order, run_script, targets_of
from psrl.swe.verdict import GradeCause, GradeReport, TestReport, judge, refused
from psrl.types import SandboxLimits, SweProblem

LOG_BYTES = 16 * 2**20
"""Of the output of a row's own test command."""
ANSWER_BYTES = 48 * 2**20
"""Of the runner's answer."""
RUNNER_GRACE_S = 15.0
"""Beyond the tests' own time: the runner starts, and says that they are late."""


class _Turn:
    """Gradings of equal patches, one after the other; those who waited take what the one before them found."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.report: GradeReport | None = None


class ProjectGrader:
    """Grades patches, some at once, each in a sandbox of its own. Lives in one event loop."""

    def __init__(self, sandboxes: Sandboxes, settings: ExecutionConfig, *, num_concurrent: int = 1, allow_network: bool = False) -> None:
        """At most `num_concurrent` gradings run at once, further ones wait.

        Args:
            sandboxes: Where.
            settings: `reward.execution`.
            num_concurrent: See above.
            allow_network: Of the run: without it no row gets the network, whatever it asks for.
        """
        self._sandboxes = sandboxes
        self._settings = settings
        self._limits = replace(limits_of(settings), allow_network=allow_network)
        self._places = asyncio.Semaphore(num_concurrent)
        self._verdicts: OrderedDict[bytes, GradeReport] = OrderedDict()
        self._turns: WeakValueDictionary[bytes, _Turn] = WeakValueDictionary()  # a group's equal patches wait for one verdict
        self._parsers = LogParsers(num_processes=num_concurrent, timeout_s=COMMAND_WALL_S)

    async def grade(self, problem: SweProblem, patch: str) -> GradeReport:
        """The verdict on a patch; that of the same problem and patch is kept.

        Raises:
            SandboxError: No sandbox could be had, twice.
            EnvironmentFault: The project cannot be made ready, or its own test patch does not apply.
            RewardError: The grading itself failed or took longer than `timeout_s`.
        """
        try:
            checked = check_patch(patch, max_bytes=self._settings.max_patch_kb * 1024)
        except PatchRefusedError as error:
            return refused(problem, error.cause, error.detail)
        key = blake2b(repr(problem).encode("utf-8", "replace") + b"\0" + checked.content).digest()
        turn = self._turns.setdefault(key, _Turn())
        has_waited = turn.lock.locked()
        async with turn.lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                return self._verdicts[key]
            if has_waited and turn.report is not None:  # a time-out, which is not kept
                return turn.report
            required = (*problem.fail_to_pass, *problem.pass_to_pass)
            try:
                report = judge(problem, await self._run(problem, checked, targets_of(problem, required)))
            except PatchRefusedError as error:
                report = refused(problem, error.cause, error.detail)
            turn.report = report
            self._keep(key, report)
            return report

    async def run_tests(self, problem: SweProblem, patch: str) -> TestReport:
        """How every test of the problem ends with a patch (empty: with none); for validation, never kept.

        Raises:
            PatchRefusedError: The patch cannot be tried.
            SandboxError, EnvironmentFault, RewardError: See `grade`.
        """
        checked = check_patch(patch, max_bytes=self._settings.max_patch_kb * 1024) if patch.strip() else None
        return await self._run(problem, checked, targets_of(problem, None))

    async def close(self) -> None:
        """End the children that read logs."""
        await self._parsers.close()

    def _keep(self, key: bytes, report: GradeReport) -> None:
        """Only what the patch decides: a slow machine decides some time-outs, and such a verdict is asked for again."""
        if report.cause is GradeCause.TIMEOUT or self._settings.cache_size == 0:
            return
        self._verdicts[key] = report
        while len(self._verdicts) > self._settings.cache_size:
            self._verdicts.popitem(last=False)

    async def _run(self, problem: SweProblem, patch: CheckedPatch | None, targets: tuple[str, ...]) -> TestReport:
        """In a fresh sandbox; in a second one where the first was lost."""
        async with self._places:
            try:
                async with asyncio.timeout(self._settings.timeout_s):
                    try:
                        return await self._run_once(problem, patch, targets)
                    except SandboxError as error:
                        if not error.is_retryable:
                            raise
                    return await self._run_once(problem, patch, targets)
            except TimeoutError as error:
                fix = "raise reward.execution.timeout_s"
                raise RewardError(f"{problem.instance_id}: grading took longer than {self._settings.timeout_s:g} s; {fix}") from error

    async def _run_once(self, problem: SweProblem, patch: CheckedPatch | None, targets: tuple[str, ...]) -> TestReport:
        seconds: dict[str, float] = {}
        mark = _stopwatch(seconds)
        sandbox = self._sandboxes.make(sandbox_spec(problem, self._limits))
        try:
            await sandbox.start()
            mark("sandbox")
            base = await prepare_project(sandbox, problem)
            mark("project")
            changes = await apply_patch(sandbox, patch, base, self._limits) if patch is not None else ()
            try:
                neutralised = await put_back(sandbox, problem, base, changes, self._limits)
                await apply_test_patch(sandbox, problem, self._limits)
                settings = PytestSettings()
                if problem.test_command is None:
                    settings, _ = await pytest_settings(sandbox, problem, targets, self._limits)
            except PlaceFullError as error:
                if patch is None or not swells(patch):
                    raise
                raise PatchRefusedError(GradeCause.TOO_LARGE, f"it leaves no room: {error}") from error
            mark("patch")
            kept = [change for change in changes if change.path not in neutralised]
            if problem.test_command is not None:
                report = await self._run_command(sandbox, problem)
            else:
                report = await self._run_pytest(sandbox, problem, patch, kept, targets, settings)
            mark("tests")
        finally:
            await asyncio.shield(sandbox.stop())
        return replace(report, neutralised=tuple(sorted(neutralised)), seconds=seconds)

    # ------------------------------------------------------------ the tests

    async def _run_pytest(
        self,
        sandbox: Sandbox,
        problem: SweProblem,
        patch: CheckedPatch | None,
        kept: list[Change],
        targets: tuple[str, ...],
        settings: PytestSettings,
    ) -> TestReport:
        added_lines = patch.added_lines if patch is not None else {}
        order = run_order(problem, targets=targets, added_lines=added_lines, changes=kept, settings=settings)
        limits = replace(
            self._limits,
            wall_s=problem.timeout_s + RUNNER_GRACE_S,
            cpu_s=2 * problem.timeout_s + RUNNER_GRACE_S,
            output_bytes=ANSWER_BYTES,
        )
        ended = await sandbox.run(run_script(), stdin=order.content, limits=limits)
        return read_answer(ended, order)

    async def _run_command(self, sandbox: Sandbox, problem: SweProblem) -> TestReport:
        assert problem.test_command is not None, "checked by the caller"
        limits = replace(
            self._limits,
            wall_s=problem.timeout_s,
            cpu_s=4 * problem.timeout_s,
            output_bytes=LOG_BYTES,
        )
        ended = await sandbox.run(["bash", "-c", f"exec 2>&1\n{problem.test_command}"], limits=limits)
        return await self._parsers.read(problem, ended)


def limits_of(settings: ExecutionConfig) -> SandboxLimits:
    """Of the grading sandbox, and of each command in it unless it has its own."""
    return SandboxLimits(
        wall_s=settings.timeout_s,
        cpu_s=settings.timeout_s,
        memory_bytes=settings.memory_mb * 2**20,
        num_processes=settings.num_processes,
        output_bytes=64 * 1024,
        disk_bytes=settings.disk_mb * 2**20,
    )


def _stopwatch(seconds: dict[str, float]) -> Callable[[str], None]:
    last = time.monotonic()

    def mark(part: str) -> None:
        nonlocal last
        now = time.monotonic()
        seconds[part], last = now - last, now

    return mark
