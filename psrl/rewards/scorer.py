"""Choosing a scorer from the settings, the environment's own rewards, and DAPO's overlong punishment."""

from __future__ import annotations

from psrl.config.reward import OverlongBufferConfig
from psrl.errors import ConfigError, RewardError
from psrl.rewards.base import EpisodeScorer, ScorerParts, scorers
from psrl.types import LoopResult, Outcome, Score, Task

ENVIRONMENT_ACCURACY = "env/accuracy"
"""Counter of an episode whose environment says itself whether it was solved."""


def build_scorer(parts: ScorerParts) -> EpisodeScorer:
    """The scorer of `reward.name`, with the overlong punishment around it where enabled.

    Raises:
        ConfigError: No such scorer, or settings that contradict each other.
    """
    import psrl.rewards.custom
    import psrl.rewards.execution_scorer
    import psrl.rewards.math_scorer
    import psrl.rewards.retool  # noqa: F401  (each registers itself)

    reward, custom = parts.reward, parts.custom
    if custom.path is not None and reward.name != "custom":
        raise ConfigError(
            key="custom_reward_function.path",
            value=custom.path,
            rule=f"has no effect with reward.name={reward.name}",
            fix="set reward.name=custom, or remove custom_reward_function.path",
        )
    scorer = scorers.resolve(reward.name)(parts)
    return OverlongScorer(scorer, reward.overlong_buffer) if reward.overlong_buffer.enable else scorer


@scorers.register("environment")
class EnvironmentScorer(EpisodeScorer):
    """The sum of what the environment returned."""

    def __init__(self, parts: ScorerParts) -> None:
        """Needs none of them."""

    async def judge(self, task: Task, result: LoopResult) -> Score:
        """Steps without a reward count as 0; a finished episode without any reward was not judged by its environment."""
        judged = [value for value in result.step_rewards if value is not None]
        if not judged and result.outcome is Outcome.FINISHED:
            raise RewardError(f"task {task.uid}: the environment gave no reward in any step; set reward.name to a scorer that judges it")
        total = float(sum(judged))
        solved = 1.0 if total > 0 else 0.0
        return Score(reward=total, accuracy=result.counts.get(ENVIRONMENT_ACCURACY, solved))


class OverlongScorer(EpisodeScorer):
    """DAPO's soft overlong punishment (Yu et al. 2025, section 3.4) around another scorer.

    With N sampled tokens of at most M, and a buffer of B: nothing up to M - B, then linear down to -penalty_factor at M.

    Example:
        M=100, B=20, factor 1: 80 tokens cost 0, 90 cost 0.5, 100 cost 1.
    """

    def __init__(self, inner: EpisodeScorer, settings: OverlongBufferConfig) -> None:
        """Raises ConfigError where the buffer is not shorter than the limit."""
        if not 0 < settings.len < settings.max_sampled_tokens:
            raise ConfigError(
                key="reward.overlong_buffer.len",
                value=settings.len,
                rule=f"must be between 1 and max_sampled_tokens={settings.max_sampled_tokens}",
                fix="set reward.overlong_buffer.max_sampled_tokens to the sampled tokens at which the penalty is full",
            )
        self._inner = inner
        self._settings = settings

    async def judge(self, task: Task, result: LoopResult) -> Score:
        """The inner reward less the penalty; the accuracy stays."""
        score = await self._inner.judge(task, result)
        if score.reward is None:
            return score
        penalty = self.penalty(sum(trajectory.num_sampled for trajectory in result.trajectories))
        return Score(reward=score.reward - penalty, accuracy=score.accuracy, parts={**score.parts, "overlong_penalty": penalty})

    def penalty(self, num_sampled: int) -> float:
        """What an episode with so many sampled tokens loses. Observations do not count: the policy did not write them."""
        start = self._settings.max_sampled_tokens - self._settings.len
        share = min(max(num_sampled - start, 0) / self._settings.len, 1.0)
        return share * self._settings.penalty_factor

    async def self_test(self) -> None:
        """That of the inner scorer."""
        await self._inner.self_test()

    async def close(self) -> None:
        """Close the inner scorer."""
        await self._inner.close()
