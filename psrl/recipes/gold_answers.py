"""Whether a question can be graded: a final turn that boxes the reference answer must be right by the recipe's own scorer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from psrl.config.reward import RewardConfig
from psrl.config.sandbox import SandboxConfig
from psrl.errors import RewardError
from psrl.recipes.questions import Question
from psrl.rewards.base import ScorerParts
from psrl.rewards.math_answer import same_plain_answer
from psrl.rewards.math_scorer import BoxChecker
from psrl.rewards.scorer import build_scorer
from psrl.sandbox import BackendSandboxes
from psrl.types import LoopResult, Outcome, Task, TaskUid

ANOTHER_ANSWER = "0.12345"
"""Compared with an answer that is a plain number, text decides; otherwise mathematics must."""


def ungradable(questions: Sequence[Question], *, reward_name: str) -> dict[int, str]:
    """Position -> why, of each question whose reference answer is not right by its own measure.

    An answer that is no plain number must also be equal to itself by math-verify, without which nobody who writes it differently
    would be right.
    """
    return asyncio.run(_ungradable(questions, reward_name))


async def _ungradable(questions: Sequence[Question], reward_name: str) -> dict[int, str]:
    reward = RewardConfig(name=reward_name)
    scorer, checker = build_scorer(ScorerParts(reward=reward, sandboxes=BackendSandboxes(SandboxConfig()))), BoxChecker(reward)
    found: dict[int, str] = {}
    try:
        for position, question in enumerate(questions):
            task = Task(uid=TaskUid("gold"), prompt=(), data_source=question.data_source, ground_truth=question.answer)
            text = f"The answer is \\boxed{{{question.answer}}}."
            final = LoopResult(outcome=Outcome.FINISHED, trajectories=(), messages=(), turn_texts=(text,))
            try:
                score = await scorer.score(task, final)
                is_equal = score.accuracy == 1.0 and await _is_equal_to_itself(question.answer, checker)
            except RewardError as error:
                found[position] = f"{question.answer!r} cannot be graded: {error}"
                continue
            if not is_equal:
                found[position] = f"{question.answer!r} in a box is not right by reward.name={reward_name}"
        return found
    finally:
        await scorer.close()
        await checker.close()


async def _is_equal_to_itself(answer: str, checker: BoxChecker) -> bool:
    if same_plain_answer(answer, ANOTHER_ANSWER) is not None:
        return True
    return await checker.equal_by_mathematics(answer, answer)
