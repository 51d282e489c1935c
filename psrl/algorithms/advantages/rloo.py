"""RLOO: an episode's reward against the mean of the others of its group (Ahmadian et al. 2024, Back to basics, arXiv 2402.14740, eq. 8)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from psrl.algorithms.advantages.base import AdvantageBatch, AdvantageEstimator, Estimates, advantage_estimators
from psrl.algorithms.advantages.groups import centred, episode_advantages
from psrl.config.algorithm import AlgorithmConfig


@advantage_estimators.register("rloo")
class Rloo(AdvantageEstimator):
    """reward - mean of the other rewards; unlike GRPO's, the baseline does not depend on the reward itself, so it is unbiased."""

    needed_columns: ClassVar[tuple[str, ...]] = ()

    def estimate(self, batch: AdvantageBatch, settings: AlgorithmConfig) -> Estimates:
        """A scalar for each trajectory. Raises TrainingError."""
        return Estimates(advantages=episode_advantages(batch.tags, leave_one_out))


def leave_one_out(rewards: Sequence[float]) -> list[float]:
    """Distance to the mean of the others: n / (n - 1) times that to the mean of all. A group of one has no baseline: 0.

    Example:
        1, 0, 0, 0 -> 1 - 0 = 1, and 0 - 1/3 = -1/3 three times.
    """
    num = len(rewards)
    return [advantage * num / (num - 1) for advantage in centred(rewards, divide=False)] if num > 1 else [0.0]
