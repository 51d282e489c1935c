"""Rewards of single steps over long horizons: each turn's own discounted return against those of its group at the same turn.

R_k = sum over turn k and later ones l of gamma^(l - k) r_l, compared among the episodes of the group that took a turn k: the step-level
advantage of GiGPO (Feng et al. 2025, arXiv 2505.10978, section 3.2) with the number of the turn as the state that they share. What happened
before a turn is neither its merit nor its fault, and what follows counts less the later it is.
"""

from __future__ import annotations

from typing import ClassVar

from psrl.algorithms.advantages.base import AdvantageBatch, AdvantageEstimator, Estimates, advantage_estimators
from psrl.algorithms.advantages.tokens import TURN_COLUMNS, discounted_sums, turn_rewards
from psrl.algorithms.advantages.turns import centred_by_turn, spread_over_turns
from psrl.config.algorithm import AlgorithmConfig


@advantage_estimators.register("step_return")
class StepReturn(AdvantageEstimator):
    """(R_k - mean of the group at turn k) / (deviation + 1e-6); a turn that one episode alone took has 0.

    gamma is per turn; 0.95 as published. With one reward at the end, gamma 1 and equally many turns it is GRPO.

    Example:
        gamma 0.5, rewards by turn (1, 0) and (0, 0): returns (1, 0) and (0, 0); without division turn 0 has 0.5 and -0.5, turn 1 has 0.
    """

    needed_columns: ClassVar[tuple[str, ...]] = TURN_COLUMNS

    def estimate(self, batch: AdvantageBatch, settings: AlgorithmConfig) -> Estimates:
        """[T] for each trajectory. Raises TrainingError."""
        returns = discounted_sums(turn_rewards(batch), settings.gamma)
        advantages = centred_by_turn(returns, batch, divide=settings.norm_adv_by_std_in_grpo)
        return Estimates(advantages=spread_over_turns(advantages, batch.columns))
