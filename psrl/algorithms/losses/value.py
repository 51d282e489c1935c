"""The critic's loss: squared distance to the returns, its change bounded (Schulman et al. 2017; as OpenAI's baselines and verl have it)."""

from __future__ import annotations

import torch
from torch import Tensor

from psrl.algorithms.losses.base import LossOutputs


def clipped_value_loss(values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, *, cliprange_value: float) -> LossOutputs:
    """max((V - R)^2, (clip(V, old - range, old + range) - R)^2) / 2: what went further than the range from the old value has no gradient.

    Example:
        range 0.5, old 0, R = 2: V = 0.25 gives 1.53125; V = 1 is held at 0.5: max(1, 2.25) / 2 = 1.125.
    """
    held_N = torch.clamp(values_N, old_values_N - cliprange_value, old_values_N + cliprange_value)
    plain_N, bounded_N = (values_N - returns_N).square(), (held_N - returns_N).square()
    means = {"clip/fraction": (bounded_N > plain_N).detach().float()}
    return LossOutputs(values=torch.maximum(plain_N, bounded_N) / 2, means=means)
