"""REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): no critic, no groups; the baseline is the mean over the whole batch.

`reinforce_plus_plus`: the discounted return of each token, whitened over all tokens of the batch. `reinforce_plus_plus_baseline`: the mean
of the group is taken from the reward first, then the same whitening, for tasks of unequal difficulty. The paper takes a token's KL from its
reward (`algorithm.use_kl_in_reward`) in the first form and has it in the loss (`actor.use_kl_loss`) in the second.
"""

from __future__ import annotations

from functools import partial
from typing import ClassVar

from psrl.algorithms.advantages.base import AdvantageBatch, AdvantageEstimator, Estimates, advantage_estimators
from psrl.algorithms.advantages.groups import centred, episode_advantages
from psrl.algorithms.advantages.tokens import TOKEN_COLUMNS, discounted_sums, sampled_rewards, spread_over_tokens
from psrl.algorithms.advantages.whitening import whitened
from psrl.config.algorithm import AlgorithmConfig


@advantage_estimators.register("reinforce_plus_plus")
class ReinforcePlusPlus(AdvantageEstimator):
    """whiten(sum over the token and later ones of gamma^distance * reward); gamma is per sampled token, 1 as published."""

    needed_columns: ClassVar[tuple[str, ...]] = TOKEN_COLUMNS

    def estimate(self, batch: AdvantageBatch, settings: AlgorithmConfig) -> Estimates:
        """[T] for each trajectory. Raises TrainingError."""
        returns = discounted_sums(sampled_rewards(batch), settings.gamma)
        num_tokens = [len(each) if has_loss else 0 for each, has_loss in zip(returns, batch.has_loss, strict=True)]
        return Estimates(advantages=spread_over_tokens(whitened(returns, num_tokens), batch.columns))


@advantage_estimators.register("reinforce_plus_plus_baseline")
class ReinforcePlusPlusBaseline(AdvantageEstimator):
    """whiten(reward - mean of the group), each token counted."""

    needed_columns: ClassVar[tuple[str, ...]] = ()

    def estimate(self, batch: AdvantageBatch, settings: AlgorithmConfig) -> Estimates:
        """A scalar for each trajectory. Raises TrainingError."""
        distances = episode_advantages(batch.tags, partial(centred, divide=False))
        num_tokens = [tags["num_sampled"] if has_loss else 0 for tags, has_loss in zip(batch.tags, batch.has_loss, strict=True)]
        return Estimates(advantages=whitened(distances, num_tokens))
