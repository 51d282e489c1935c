"""ReTool's reward: the answer decides, and an honest try with the tool is never worth less than none.

`REWARD_TABLE` is the whole rule; `reward_of` reads it and the docs print it (`reward_table_markdown`).
"""

from __future__ import annotations

from dataclasses import dataclass

from psrl.rewards.base import EpisodeScorer, ScorerParts, final_turn, scorers
from psrl.rewards.math_scorer import BoxChecker
from psrl.types import LoopResult, Score, Task

TOOL_TURNS = "tool_turns"
"""Counter of an episode: turns of which a call reached a tool, whatever came of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardRow:
    """One kind of ending."""

    ending: str
    reward: float
    per_tool_turn: float = 0.0
    at_most: float | None = None
    """The bonus never lifts the reward above this."""


CORRECT = RewardRow(ending="The box of the final turn is right", reward=1.0)
WRONG = RewardRow(ending="The box of the final turn is wrong", reward=-1.0, per_tool_turn=0.1, at_most=-0.6)
NO_BOX = RewardRow(ending="The final turn has no box", reward=-1.0)
REWARD_TABLE: tuple[RewardRow, ...] = (CORRECT, WRONG, NO_BOX)


def reward_of(row: RewardRow, *, num_tool_turns: int) -> float:
    """The reward of an ending.

    Example:
        WRONG with 2 tool turns is -1 + 2 * 0.1 = -0.8; with 9 it is -0.6.
    """
    reward = row.reward + row.per_tool_turn * num_tool_turns
    return reward if row.at_most is None else min(reward, row.at_most)


def reward_table_markdown() -> str:
    """REWARD_TABLE as the docs show it."""
    lines = ["| ending | reward | bonus per tool turn | at most |", "|---|---|---|---|"]
    for row in REWARD_TABLE:
        bonus = f"{row.per_tool_turn:+g}" if row.per_tool_turn else "none"
        at_most = "" if row.at_most is None else f"{row.at_most:+g}"
        lines.append(f"| {row.ending} | {row.reward:+g} | {bonus} | {at_most} |")
    return "\n".join(lines)


@scorers.register("retool")
class RetoolScorer(EpisodeScorer):
    """REWARD_TABLE applied to the last balanced box of the final turn."""

    def __init__(self, parts: ScorerParts) -> None:
        """Children are started when first needed."""
        self._checker = BoxChecker(parts.reward)

    async def judge(self, task: Task, result: LoopResult) -> Score:
        """An episode cut at a limit is judged by what its last turn says."""
        verdict = await self._checker.check(final_turn(result), task.ground_truth)
        num_tool_turns = int(result.counts.get(TOOL_TURNS, 0))
        row = CORRECT if verdict.is_correct else WRONG if verdict.answer is not None else NO_BOX
        reward = reward_of(row, num_tool_turns=num_tool_turns)
        parts = {"has_box": float(verdict.answer is not None), "tool_bonus": reward - row.reward}
        return Score(reward=reward, accuracy=float(verdict.is_correct), parts=parts)

    async def self_test(self) -> None:
        """See BoxChecker."""
        await self._checker.self_test()

    async def close(self) -> None:
        """Kill the children."""
        await self._checker.close()
