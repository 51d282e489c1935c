"""From a loss per token to one number: every mode is a weight per token.

Each row gets raw weights; the loss is the weighted sum divided by the sum of all raw weights of the optimizer step, over all
rows, micro-batches and ranks. That sum is fixed before the first backward, so any split gives the same loss and the same gradient.

Legend: n trained tokens of one row.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from psrl.errors import ConfigError


class AggregationMode(StrEnum):
    """What counts the same."""

    TOKEN_MEAN = "token_mean"
    """Every token (DAPO)."""
    SEQ_MEAN = "seq_mean"
    """Every trajectory: the mean over its tokens, then over trajectories (GRPO)."""
    TURN_MEAN = "turn_mean"
    """Every turn: the mean over its tokens, then over all turns of all trajectories."""


def aggregation_mode(name: str) -> AggregationMode:
    """The mode of a setting.

    Raises:
        ConfigError: Unknown name.
    """
    if name not in set(AggregationMode):
        fix = f"use one of {', '.join(AggregationMode)}"
        raise ConfigError(key="actor.loss_agg_mode", value=name, rule="unknown aggregation", fix=fix)
    return AggregationMode(name)


def raw_weights(mode: AggregationMode, turns_n: Tensor) -> Tensor:
    """[n] raw weights of one row, from the turn of each of its trained tokens.

    Example:
        turns [0, 0, 0, 1]: token_mean gives [1, 1, 1, 1], seq_mean [1/4] * 4, turn_mean [1/3, 1/3, 1/3, 1].
        Their sums are the tokens (4), trajectories (1) and turns (2) of the row.
    """
    ones = torch.ones(len(turns_n), dtype=torch.float32)
    if mode is AggregationMode.TOKEN_MEAN or len(turns_n) == 0:
        return ones
    if mode is AggregationMode.SEQ_MEAN:
        return ones / len(turns_n)
    _, turn_of_n, counts = torch.unique(turns_n, return_inverse=True, return_counts=True)
    return torch.reciprocal(counts[turn_of_n].to(torch.float32))
