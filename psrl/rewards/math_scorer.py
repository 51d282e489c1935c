"""Judging a boxed answer: by text and plain numbers where they decide it, else by math-verify in a child that can be killed."""

from __future__ import annotations

from dataclasses import dataclass

from psrl.config.reward import RewardConfig
from psrl.errors import RewardError
from psrl.rewards.base import EpisodeScorer, ScorerParts, final_turn, scorers
from psrl.rewards.graders import GraderPool
from psrl.rewards.math_answer import last_boxed, same_plain_answer
from psrl.types import LoopResult, Score, Task

KNOWN_ANSWERS: tuple[tuple[str, str, bool], ...] = (
    (r"\frac{\sqrt{16}}{8}", r"\frac12", True),
    (r"x^2 + 2x + 1", r"(x+1)^2", True),
    (r"\frac{2}{3}", r"\frac{3}{2}", False),
    (r"\sqrt{2}", r"2", False),
)
"""(answer, truth, equal): what the self-test grades in the child."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What the final turn answered."""

    answer: str | None
    """Content of the last balanced box; None where there is none."""
    is_correct: bool


class BoxChecker:
    """Finds the answer of a turn and compares it with the truth."""

    def __init__(self, reward: RewardConfig) -> None:
        """Starts no process: most answers never need one."""
        self._pool = GraderPool(arguments=("math",), num_processes=reward.num_processes, timeout_s=reward.timeout_s)

    async def check(self, text: str, truth: object) -> Verdict:
        """Judge one turn.

        Raises:
            RewardError: The comparison failed or ran out of time, or the task has no truth.
        """
        if truth is None or not str(truth).strip():
            raise RewardError("the task has no ground truth")
        answer = last_boxed(text)
        if answer is None:
            return Verdict(answer=None, is_correct=False)
        is_correct = same_plain_answer(answer, str(truth))
        if is_correct is None:
            is_correct = await self.equal_by_mathematics(answer, str(truth))
        return Verdict(answer=answer, is_correct=is_correct)

    async def equal_by_mathematics(self, answer: str, truth: str) -> bool:
        """Ask math-verify in a child."""
        reply = await self._pool.grade({"answer": answer, "truth": truth})
        return bool(reply["equal"])

    async def self_test(self) -> None:
        """Grade KNOWN_ANSWERS in a child; RewardError names the first that comes out wrong."""
        for answer, truth, expected in KNOWN_ANSWERS:
            if await self.equal_by_mathematics(answer, truth) is not expected:
                raise RewardError(f"math-verify says {answer!r} and {truth!r} are {'different' if expected else 'equal'}")

    async def close(self) -> None:
        """Kill the children."""
        await self._pool.close()


@scorers.register("math_answer")
class MathAnswerScorer(EpisodeScorer):
    """1 for a right boxed answer in the final turn, else 0."""

    def __init__(self, parts: ScorerParts) -> None:
        """Children are started when first needed."""
        self._checker = BoxChecker(parts.reward)

    async def judge(self, task: Task, result: LoopResult) -> Score:
        """An episode cut at a limit is judged by what its last turn says."""
        verdict = await self._checker.check(final_turn(result), task.ground_truth)
        value = 1.0 if verdict.is_correct else 0.0
        return Score(reward=value, accuracy=value, parts={"has_box": float(verdict.answer is not None)})

    async def self_test(self) -> None:
        """See BoxChecker."""
        await self._checker.self_test()

    async def close(self) -> None:
        """Kill the children."""
        await self._checker.close()
