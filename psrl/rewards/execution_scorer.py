"""The reward of a patch: `reward.name=execution`.

`REWARD_TABLE` is the whole rule; `reward_of` reads it and the docs print it (`reward_table_markdown`). In every mode a resolved problem
is worth 1, an honest attempt is never worth less than none, and a violation is worth least.
"""

from __future__ import annotations

from dataclasses import dataclass

from psrl.config.reward import ExecutionConfig
from psrl.errors import EnvironmentFault, RewardError, SandboxError
from psrl.rewards.base import EpisodeScorer, ScorerParts, scorers
from psrl.rewards.execution import ProjectGrader
from psrl.swe.verdict import GradeCause, GradeReport
from psrl.types import LoopResult, Score, SweProblem, Task

MODES = ("binary", "test_ratio", "partial_credit", "shaped")
MOST_FOR_AN_ATTEMPT = 0.9
"""An attempt that is not resolved stays below 1, however many tests it passes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardRow:
    """One kind of ending: its reward in each mode, and what a share of tests adds to it."""

    ending: str
    causes: tuple[GradeCause, ...]
    binary: float
    test_ratio: float
    partial_credit: float
    shaped: float
    has_shares: bool = False
    """Whether SHARES of the mode is added."""


RESOLVED = RewardRow(ending="resolved", causes=(GradeCause.RESOLVED,), binary=1, test_ratio=1, partial_credit=1, shaped=1)
ATTEMPT = RewardRow(
    ending="an honest attempt: the tests ran and a required one did not pass, they crashed, or their time was over",
    causes=(GradeCause.TESTS_FAILED, GradeCause.NO_REPORT, GradeCause.TIMEOUT),
    binary=0, test_ratio=0, partial_credit=0, shaped=0.05, has_shares=True,
)  # fmt: skip
UNUSABLE = RewardRow(
    ending="a patch that does not apply, or is too large",
    causes=(GradeCause.INVALID_PATCH, GradeCause.TOO_LARGE),
    binary=0, test_ratio=0, partial_credit=0, shaped=0,
)  # fmt: skip
NOTHING = RewardRow(ending="nothing was changed", causes=(GradeCause.EMPTY_PATCH,), binary=0, test_ratio=0, partial_credit=0, shaped=0)
VIOLATION = RewardRow(
    ending="a violation: the patch reaches out of the project, or interfered with the tests' report",
    causes=(GradeCause.FORBIDDEN_PATH, GradeCause.TAMPERED),
    binary=-1, test_ratio=-1, partial_credit=-1, shaped=-1,
)  # fmt: skip
REWARD_TABLE: tuple[RewardRow, ...] = (RESOLVED, ATTEMPT, UNUSABLE, NOTHING, VIOLATION)
SHARES: dict[str, str] = {
    "binary": "nothing",
    "test_ratio": "0.9 x required tests that pass / required tests",
    "partial_credit": "0.9 x FAIL_TO_PASS tests that pass / FAIL_TO_PASS tests, if every PASS_TO_PASS test passes",
    "shaped": "0.2 x FAIL_TO_PASS tests that pass / FAIL_TO_PASS tests, of which 0.05 is lost where a PASS_TO_PASS test fails",
}
_ROW_OF = {cause: row for row in REWARD_TABLE for cause in row.causes}


def reward_of(report: GradeReport, mode: str) -> float:
    """The reward of a verdict.

    Example:
        2 of 4 FAIL_TO_PASS and 6 of 6 PASS_TO_PASS pass: `binary` 0, `test_ratio` 0.9 * 8/10 = 0.72, `partial_credit`
        0.9 * 2/4 = 0.45, `shaped` 0.05 + 0.2 * 2/4 = 0.15. With 5 of 6: 0, 0.63, 0, 0.05 + 0.1 - 0.05 = 0.1.
    """
    row = _ROW_OF[report.cause]
    base = {"binary": row.binary, "test_ratio": row.test_ratio, "partial_credit": row.partial_credit, "shaped": row.shaped}[mode]
    return base + (_share(report, mode) if row.has_shares else 0.0)


def _share(report: GradeReport, mode: str) -> float:
    mended = report.f2p_passed / report.f2p_total if report.f2p_total else 0.0
    is_whole = report.p2p_passed == report.p2p_total
    total = report.f2p_total + report.p2p_total
    if mode == "test_ratio":
        return MOST_FOR_AN_ATTEMPT * (report.f2p_passed + report.p2p_passed) / total if total else 0.0
    if mode == "partial_credit":
        return MOST_FOR_AN_ATTEMPT * mended if is_whole else 0.0
    if mode == "shaped":
        return max(0.0, 0.2 * mended - (0.0 if is_whole else 0.05))
    return 0.0


def reward_table_markdown() -> str:
    """REWARD_TABLE and SHARES as the docs show them."""
    lines = [f"| ending | {' | '.join(f'`{mode}`' for mode in MODES)} |", "|---" * (len(MODES) + 1) + "|"]
    for row in REWARD_TABLE:
        plus = " + share" if row.has_shares else ""
        values = (row.binary, row.test_ratio, row.partial_credit, row.shaped)
        cells = [f"{value:g}{plus if mode != 'binary' else ''}" for mode, value in zip(MODES, values, strict=True)]
        lines.append(f"| {row.ending} | {' | '.join(cells)} |")
    lines += ["", "| mode | share |", "|---|---|", *(f"| `{mode}` | {SHARES[mode]} |" for mode in MODES)]
    return "\n".join(lines)


@scorers.register("execution")
class ExecutionScorer(EpisodeScorer):
    """REWARD_TABLE applied to what the agent left."""

    def __init__(self, parts: ScorerParts) -> None:
        """Sandboxes are made when a patch is graded."""
        self._settings: ExecutionConfig = parts.reward.execution
        self._grader = ProjectGrader(
            parts.sandboxes, self._settings, num_concurrent=parts.reward.num_processes, allow_network=parts.allow_network
        )

    async def judge(self, task: Task, result: LoopResult) -> Score:
        """An episode without a submission changed nothing; one that was cut at a limit is judged by the patch that it left.

        Raises:
            RewardError: Nothing can be said of the patch: the row is broken, the sandbox was lost, the project cannot be made ready.
        """
        problem = SweProblem.of_task(task)
        patch = result.submission.patch if result.submission is not None else ""
        try:
            report = await self._grader.grade(problem, patch)
        except (SandboxError, EnvironmentFault) as error:
            raise RewardError(f"{problem.instance_id}: {type(error).__name__}: {error}") from error
        return score_of(report, self._settings.mode)

    async def close(self) -> None:
        """End the children of the grader."""
        await self._grader.close()


def score_of(report: GradeReport, mode: str) -> Score:
    """A verdict as a score: the accuracy is whether the problem is resolved, in every mode."""
    parts = {f"cause/{report.cause.value}": 1.0, "tests_s": float(report.seconds["tests"]) if "tests" in report.seconds else 0.0}
    parts["f2p_share"] = report.f2p_passed / report.f2p_total if report.f2p_total else 0.0
    parts["p2p_share"] = report.p2p_passed / report.p2p_total if report.p2p_total else 0.0
    parts |= {"num_neutralised": float(len(report.neutralised)), "grading_s": float(sum(report.seconds.values()))}
    return Score(reward=reward_of(report, mode), accuracy=float(report.is_resolved), parts=parts)
