"""Turn-level credit: MT-GRPO (Wei et al. 2025, arXiv 2505.11821, eq. 5 and 6, for any number of turns).

The outcome is the reward of an episode's last turn, compared among all episodes of the group, however many turns they took. The reward of
an earlier turn is compared among the episodes that took that turn and did not end with it. Each turn has its own advantage and gamma times
that of the next one.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from psrl.algorithms.advantages.base import AdvantageBatch, AdvantageEstimator, Estimates, advantage_estimators
from psrl.algorithms.advantages.tokens import TURN_COLUMNS, discounted_sums, turn_rewards
from psrl.algorithms.advantages.turns import centred_by_turn, spread_over_turns
from psrl.config.algorithm import AlgorithmConfig


@advantage_estimators.register("mt_grpo")
class MtGrpo(AdvantageEstimator):
    """A_K = outcome advantage, A_k = advantage of turn k's own reward + gamma A_{k+1}; gamma (the paper's alpha) 1 as published.

    Example:
        Two episodes of two turns, rewards (1, 0) and (0, 1), without division: turn 0 has 0.5 and -0.5, the outcome -0.5 and 0.5; with
        gamma 1 the advantages are (0.5 - 0.5, -0.5) = (0, -0.5) and (0, 0.5).
    """

    needed_columns: ClassVar[tuple[str, ...]] = TURN_COLUMNS

    def estimate(self, batch: AdvantageBatch, settings: AlgorithmConfig) -> Estimates:
        """[T] for each trajectory. Raises TrainingError."""
        rewards, divide = turn_rewards(batch), settings.norm_adv_by_std_in_grpo
        outcomes = centred_by_turn([each[-1:] for each in rewards], batch, divide=divide)
        earlier = centred_by_turn([each[:-1] for each in rewards], batch, divide=divide)
        own = [torch.cat(parts) for parts in zip(earlier, outcomes, strict=True)]
        return Estimates(advantages=spread_over_turns(discounted_sums(own, settings.gamma), batch.columns))
