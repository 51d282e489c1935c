"""Estimates of KL(policy || reference) from sampled tokens (Schulman, Approximating KL Divergence).

With d = log policy - log reference of a token sampled from the policy: k1 = d (unbiased, may be negative), k2 = d^2 / 2 (biased, low
variance), k3 = exp(-d) - 1 + d (unbiased, never negative). Tokens that older weights sampled (psrl.staleness, later updates of a
buffer) are of another distribution: on them k1 and k3 are biased too, and no importance weight corrects it.

That k1 and k3 are unbiased is said of their values. As a term of a loss only the gradient counts: k1's has mean 0, whatever the KL,
k3's is that of KL(reference || policy), and k2's is the KL's own. `k1+` and `k3+` have the value of k1 and k3 and the gradient of k2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from psrl.errors import ConfigError

MAX_LOG_RATIO = 20.0
"""Of every ratio of policies: exp(20) is 5e8, beyond any clip and still finite in float32. verl's bound too."""
Estimator = Callable[[Tensor, Tensor], Tensor]
"""(logprobs_N, ref_logprobs_N) -> kl_N."""


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


def _with_gradient_of_k2(value: Estimator) -> Estimator:
    def straight_through(logprobs_N: Tensor, ref_logprobs_N: Tensor) -> Tensor:
        gradient_N = kl_k2(logprobs_N, ref_logprobs_N)
        return gradient_N - gradient_N.detach() + value(logprobs_N, ref_logprobs_N).detach()

    return straight_through


ESTIMATORS: dict[str, Estimator] = {
    "k1": kl_k1,
    "k2": kl_k2,
    "k3": kl_k3,
    "k1+": _with_gradient_of_k2(kl_k1),
    "k3+": _with_gradient_of_k2(kl_k3),
}


def kl_estimator(name: str) -> Estimator:
    """The estimator of a setting.

    Raises:
        ConfigError: Unknown name.
    """
    if name not in ESTIMATORS:
        raise ConfigError(key="actor.kl_loss_type", value=name, rule="unknown estimator", fix=f"use one of {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]
