"""Advantages made to mean 0 and deviation 1 over all tokens that are trained on: every rank's, not a micro-batch's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

EPSILON = 1e-8
"""Added to the variance, as verl and TRL do."""


def whitened(values: Sequence[Tensor], num_tokens: Sequence[int]) -> list[Tensor]:
    """(value - mean) / sqrt(variance + 1e-8), n - 1 in the variance's denominator, over all tokens.

    Args:
        values: For each trajectory a scalar, which each of its tokens has, or one value for each of its trained tokens.
        num_tokens: Tokens of each trajectory that are trained on; 0 leaves it out of the statistics.

    Returns:
        The same shapes in float32. Fewer than two tokens have nothing to be compared with: 0.

    Example:
        Scalars 1 and 0 of 1 and 3 tokens: mean 1/4, variance (9/16 + 3/16) / 3 = 1/4 -> 1.5 and -0.5.
    """
    total = sum(num_tokens)
    if total < 2:
        return [torch.zeros_like(each) for each in values]
    counted = list(zip((each.double() for each in values), num_tokens, strict=True))
    mean = sum(_sum(each, num) for each, num in counted) / total
    variance = sum(_sum((each - mean).square(), num) for each, num in counted) / (total - 1)
    scale = (variance + EPSILON) ** -0.5
    return [((each - mean) * scale).float() for each, _ in counted]


def _sum(values: Tensor, num: int) -> float:
    """Of one trajectory; a scalar stands for `num` tokens."""
    if num == 0:
        return 0.0
    return float(values) * num if values.dim() == 0 else float(values.sum())
