"""Rewards where they were earned: column `rewards`, by sampled token and by turn, and sums over what follows.

Observation tokens are no steps of time: what stands between two turns neither discounts nor cuts a sum.

Legend: T tokens of a trajectory, n sampled tokens, K turns, R trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from psrl.algorithms.advantages.base import AdvantageBatch
from psrl.errors import TrainingError

TOKEN_COLUMNS = ("loss_mask", "rewards")
TURN_COLUMNS = (*TOKEN_COLUMNS, "turn_indices")


def sampled_rewards(batch: AdvantageBatch) -> list[Tensor]:
    """[n] float64 of each trajectory; they sum to its episode's reward.

    Raises:
        TrainingError: A reward is not finite.
    """
    rewards = [columns["rewards"][columns["loss_mask"].bool()].double() for columns in batch.columns]
    for each, tags in zip(rewards, batch.tags, strict=True):
        if not torch.isfinite(each).all():
            raise TrainingError(f"episode {tags['episode']} has a reward that is not finite")
    return rewards


def turn_rewards(batch: AdvantageBatch) -> list[Tensor]:
    """[K] float64 of each trajectory, of the turns that it was sampled in. Raises TrainingError."""
    sums = []
    for rewards_n, columns in zip(sampled_rewards(batch), batch.columns, strict=True):
        turn_n = turns_of(columns)
        sums.append(torch.zeros(int(turn_n.max()) + 1, dtype=torch.float64).index_add(0, turn_n, rewards_n))
    return sums


def turns_of(columns: Mapping[str, Tensor]) -> Tensor:
    """[n] which of the trajectory's sampled turns each token is of, from 0 without gaps: turns that are context only are none."""
    _, turn_n = torch.unique(columns["turn_indices"][columns["loss_mask"].bool()].long(), return_inverse=True)
    assert isinstance(turn_n, Tensor)
    return turn_n


def discounted_sums(terms: Sequence[Tensor], factor: float) -> list[Tensor]:
    """Of each sequence, at each place: its term and those after it, times factor^distance.

    Example:
        Terms 1, 0, 4 and factor 0.5: 2, 2, 4.
    """
    if not terms:
        return []
    padded_LR = pad_sequence(list(terms))  # [longest, R]; padding is 0 and stands at the end, where it adds nothing
    sums_LR = torch.empty_like(padded_LR)
    running_R = padded_LR.new_zeros(len(terms))
    for place in range(len(padded_LR) - 1, -1, -1):
        running_R = padded_LR[place] + factor * running_R
        sums_LR[place] = running_R
    return [sums_LR[: len(each), row] for row, each in enumerate(terms)]


def spread_over_tokens(values: Sequence[Tensor], columns: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    """[T] float32 of each trajectory from [n]: 0 where nothing was sampled."""
    spread = []
    for values_n, each in zip(values, columns, strict=True):
        mask_T = each["loss_mask"].bool()
        spread.append(torch.zeros(len(mask_T), dtype=torch.float32).masked_scatter(mask_T, values_n.float()))
    return spread
