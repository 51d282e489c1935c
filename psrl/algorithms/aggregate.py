"""From a loss per token to one number: every mode is a weight per token.

Each row gets raw weights; the loss is the weighted sum divided by the sum of what each row counts (its raw weights; with `seq_sum` one)
over all rows, micro-batches and ranks. That sum is fixed before the first backward, so any split gives the same loss and the same gradient.

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
    SEQ_SUM = "seq_sum"
    """Every token, divided by a length that is the same for all trajectories, then the mean over trajectories (Dr. GRPO)."""
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


def raw_weights(mode: AggregationMode, turns_n: Tensor, *, length: int) -> Tensor:
    """[n] raw weights of one row, from the turn of each of its trained tokens; `length` is what `seq_sum` divides by.

    Example:
        turns [0, 0, 0, 1]: token_mean gives [1, 1, 1, 1], seq_mean [1/4] * 4, turn_mean [1/3, 1/3, 1/3, 1].
        Their sums are the tokens (4), trajectories (1) and turns (2) of the row. seq_sum with length 8 gives [1/8] * 4.
    """
    ones = torch.ones(len(turns_n), dtype=torch.float32)
    if mode is AggregationMode.TOKEN_MEAN or len(turns_n) == 0:
        return ones
    if mode is AggregationMode.SEQ_MEAN:
        return ones / len(turns_n)
    if mode is AggregationMode.SEQ_SUM:
        return ones / length
    _, turn_of_n, counts = torch.unique(turns_n, return_inverse=True, return_counts=True)
    return torch.reciprocal(counts[turn_of_n].to(torch.float32))


def count(mode: AggregationMode, weights_n: Tensor) -> float:
    """What a row adds to the denominator.

    Example:
        Of the rows above: 4, 1, 2; with seq_sum 1, whatever its weights.
    """
    return float(len(weights_n) > 0) if mode is AggregationMode.SEQ_SUM else float(weights_n.double().sum())
