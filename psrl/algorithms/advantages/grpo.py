"""GRPO: an episode's reward against the mean of its group (Shao et al. 2024, DeepSeekMath, arXiv 2402.03300, section 4.1).

`algorithm.norm_adv_by_std_in_grpo=false` leaves the division out: Dr. GRPO's advantage (Liu et al. 2025, arXiv 2503.20783); its loss is
`actor.loss_agg_mode=seq_sum`. Groups may have different sizes (members dropped): each has its own mean and deviation.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from psrl.algorithms.advantages.base import AdvantageBatch, AdvantageEstimator, Estimates, advantage_estimators
from psrl.algorithms.advantages.groups import centred, episode_advantages
from psrl.config.algorithm import AlgorithmConfig


@advantage_estimators.register("grpo")
class Grpo(AdvantageEstimator):
    """(reward - group mean) / (group deviation + 1e-6)."""

    needed_columns: ClassVar[tuple[str, ...]] = ()

    def estimate(self, batch: AdvantageBatch, settings: AlgorithmConfig) -> Estimates:
        """A scalar for each trajectory. Raises TrainingError."""
        return Estimates(advantages=episode_advantages(batch.tags, partial(centred, divide=settings.norm_adv_by_std_in_grpo)))
