"""Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438, eq. 16) with a critic: PPO's advantage.

A step of time is a sampled token. With step rewards of the environment (column `rewards`) this is PPO with turn-level rewards (Wei et al.
2025, arXiv 2505.11821, eq. 9).
"""

from __future__ import annotations

from typing import ClassVar

import torch

from psrl.algorithms.advantages.base import AdvantageBatch, AdvantageEstimator, Estimates, advantage_estimators
from psrl.algorithms.advantages.tokens import TOKEN_COLUMNS, discounted_sums, sampled_rewards, spread_over_tokens
from psrl.algorithms.advantages.whitening import whitened
from psrl.config.algorithm import AlgorithmConfig


@advantage_estimators.register("gae")
class Gae(AdvantageEstimator):
    """A_t = sum over l of (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t, whitened over all trained tokens.

    The returns that the critic learns are A_t + V_t, before whitening.

    Example:
        Rewards 0, 1, values 0.5, 0.25, gamma 1, lam 0.5: deltas 0 + 0.25 - 0.5 = -0.25 and 1 - 0.25 = 0.75; advantages
        -0.25 + 0.5 * 0.75 = 0.125 and 0.75; returns 0.625 and 1.
    """

    needed_columns: ClassVar[tuple[str, ...]] = TOKEN_COLUMNS
    needs_critic: ClassVar[bool] = True

    def estimate(self, batch: AdvantageBatch, settings: AlgorithmConfig) -> Estimates:
        """[T] for each trajectory; 0 for those without a loss, which the critic has not seen. Raises TrainingError."""
        rewards, values = sampled_rewards(batch), [each.double() for each in batch.values]
        deltas = [
            rewards_n + settings.gamma * torch.cat([values_n[1:], values_n.new_zeros(1)]) - values_n if has_loss else values_n
            for rewards_n, values_n, has_loss in zip(rewards, values, batch.has_loss, strict=True)
        ]
        advantages = discounted_sums(deltas, settings.gamma * settings.lam)
        returns = [(advantage + value).float() for advantage, value in zip(advantages, values, strict=True)]
        white = whitened(advantages, [len(each) for each in advantages])
        whole = [each if len(each) else torch.zeros_like(rewards_n) for each, rewards_n in zip(white, rewards, strict=True)]
        return Estimates(advantages=spread_over_tokens(whole, batch.columns), returns=returns)
