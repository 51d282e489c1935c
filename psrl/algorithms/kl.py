"""Estimates of KL(policy || reference) from sampled tokens (Schulman, Approximating KL Divergence).

With d = log policy - log reference of a token sampled from the policy: k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased, low
variance), k3 = exp(-d) - 1 + d (unbiased, never negative). Tokens that older weights sampled (psrl.staleness, later updates of a
buffer) are of another distribution: on them k1 and k3 are biased too, and no importance weight corrects it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from psrl.errors import ConfigError

MAX_LOG_RATIO = 20.0
"""Of every ratio of policies: exp(20) is 5e8, beyond any clip and still finite in float32. verl's bound too."""


def kl_k1(logprobs_N: Tensor, ref_logprobs_N: Tensor) -> Tensor:
    """d."""
    return logprobs_N - ref_logprobs_N


def kl_k2(logprobs_N: Tensor, ref_logprobs_N: Tensor) -> Tensor:
    """d^2 / 2."""
    return (logprobs_N - ref_logprobs_N).square() / 2


def kl_k3(logprobs_N: Tensor, ref_logprobs_N: Tensor) -> Tensor:
    """exp(-d) - 1 + d."""
    negative = (ref_logprobs_N - logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.expm1(negative) - negative


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def kl_estimator(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The estimator of a setting: (logprobs_N, ref_logprobs_N) -> kl_N.

    Raises:
        ConfigError: Unknown name.
    """
    if name not in ESTIMATORS:
        raise ConfigError(key="actor.kl_loss_type", value=name, rule="unknown estimator", fix=f"use one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]
