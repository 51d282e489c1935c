"""What is done about data that other weights sampled: importance weights, rejection, veto (`algorithm.rollout_correction`).

All of it is from one number per sampled token: log r = log pi_train - log pi_rollout. pi_train is the proximal policy (the weights at
the start of the buffer) with recomputed logprobs, else the weights in training. Weights and rejection depend on nothing but the
token's own trajectory, all turns of it, so that any split into micro-batches gives the same loss.

Rejected tokens lose their part of the loss and keep their place in its denominator, which is fixed before the first forward pass.

Invariant: results are finite for any input, because log r is held within +-20 (exp(20) is 5e8), and sums of it again.

Legend: N trained tokens of a micro-batch, rows one after another; R rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from psrl.algorithms.kl import MAX_LOG_RATIO
from psrl.algorithms.rows import Rows
from psrl.config.rollout_correction import Criterion, RolloutCorrectionConfig, is_bounds, rs_criteria


@dataclass(frozen=True, kw_only=True, slots=True)
class Correction:
    """What the loss of each token is multiplied with, and why. No gradient anywhere."""

    raw_weights: Tensor  # [N]
    """Before truncation."""
    weights: Tensor  # [N]
    """1 without `rollout_is`."""
    keep: Tensor  # [N]
    """False: rejected, by a criterion or the veto."""
    vetoed_rows: Tensor  # [R]


class RolloutCorrection:
    """The correction that the settings ask for; does nothing by default."""

    def __init__(self, settings: RolloutCorrectionConfig) -> None:
        """Raises ConfigError where thresholds cannot be read."""
        self.has_weights = settings.rollout_is is not None
        self.rejects = settings.rollout_rs is not None or settings.rollout_token_veto_threshold is not None
        self._is_level = settings.rollout_is
        self._is_bounds = is_bounds(settings.rollout_is_threshold)
        self._criteria = rs_criteria(settings.rollout_rs, settings.rollout_rs_threshold)
        self._veto = settings.rollout_token_veto_threshold

    def __call__(self, log_ratio_N: Tensor, rows: Rows) -> Correction:
        """Weights and rejections of tokens whose log r is given."""
        log_ratio_N = bounded(log_ratio_N.detach())
        raw_N = torch.ones_like(log_ratio_N)
        if self._is_level is not None:
            raw_N = importance_ratios(log_ratio_N, rows, level=self._is_level)
        weights_N = truncated(raw_N, *self._is_bounds)
        keep_N = torch.ones_like(log_ratio_N, dtype=torch.bool)
        for criterion in self._criteria:
            keep_N &= is_inside(log_ratio_N, rows, criterion)
        vetoed_R = torch.zeros_like(rows.sizes_R, dtype=torch.bool)
        if self._veto is not None:
            vetoed_R = has_catastrophe(log_ratio_N, rows, threshold=self._veto)
            keep_N &= ~rows.spread(vetoed_R)
        return Correction(raw_weights=raw_N, weights=weights_N, keep=keep_N, vetoed_rows=vetoed_R)


def bounded(log_ratio: Tensor) -> Tensor:
    """log r within +-20; nan, which no policy gives, as -20: the token counts for nothing."""
    return torch.nan_to_num(log_ratio, nan=-MAX_LOG_RATIO).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_ratios(log_ratio_N: Tensor, rows: Rows, *, level: str) -> Tensor:
    """[N] ratios of probabilities: of each token, or of each whole trajectory given to all its tokens.

    Token: per-decision ratios, biased for a whole trajectory, of low variance (Yao et al. 2025, Your efficient RL framework secretly
    brings you off-policy RL training). Sequence: unbiased, its variance grows with the length (Liu et al. 2025, When speed kills
    stability, part 2).

    Example:
        r = 2, 2, 0.5 in one trajectory: token gives 2, 2, 0.5, sequence 2, 2, 2.
    """
    if level == "token":
        return log_ratio_N.exp()
    return rows.spread(bounded(rows.sum(log_ratio_N)).exp().to(log_ratio_N.dtype))


def truncated(ratios_N: Tensor, lower: float | None, upper: float) -> Tensor:
    """min(r, upper) (Ionides 2008, Truncated importance sampling); with `lower`, r inside both bounds and 0 outside (IcePop, 2025).

    Example:
        r = 0.4, 1, 3: upper 2 gives 0.4, 1, 2; bounds 0.5 and 2 give 0, 1, 0.
    """
    if lower is None:
        return ratios_N.clamp(max=upper)
    return torch.where((ratios_N >= lower) & (ratios_N <= upper), ratios_N, 0.0)


def divergences(log_ratio_N: Tensor, estimator: str) -> Tensor:
    """Estimates of KL(rollout || train) per token (Schulman, Approximating KL divergence), as verl names them.

    Example:
        r = 2, log r = 0.693: k1 = -0.693, k2 = 0.240, k3 = r - 1 - log r = 0.307.
    """
    if estimator == "k1":
        return -log_ratio_N
    if estimator == "k2":
        return log_ratio_N.square() / 2
    return torch.expm1(log_ratio_N) - log_ratio_N


def is_inside(log_ratio_N: Tensor, rows: Rows, criterion: Criterion) -> Tensor:
    """[N] whether a token, or its whole trajectory, is inside a criterion's bounds.

    The statistic is the token's own divergence, or its sum, mean or maximum over the trajectory. Bounds of k1 are on exp(k1), so
    that `token_k1` bounds 1/r, `seq_sum_k1` the ratio of whole trajectories and `seq_mean_k1` its geometric mean over tokens (Liu et
    al. 2025, When speed kills stability, part 3; Li et al. 2025, Trust region masking, arXiv 2512.23075). Note that these are ratios
    of rollout to train, as in verl; with bounds like 0.5 and 2 the direction does not matter.

    Example:
        r = 2, 2, 0.5 in one trajectory, bounds 0.6 and 1.5: token_k1 leaves out all (1/r = 0.5, 0.5, 2); seq_sum_k1 too (1/2);
        seq_mean_k1 keeps all (2^(-1/3) = 0.794).
    """
    statistic_N = divergences(log_ratio_N, criterion.estimator)
    if criterion.level == "token":
        return _is_between(statistic_N.double(), criterion)
    over_row = {"seq_sum": rows.sum, "seq_mean": rows.mean, "seq_max": rows.max}[criterion.level]
    return rows.spread(_is_between(over_row(statistic_N), criterion))


def has_catastrophe(log_ratio_N: Tensor, rows: Rows, *, threshold: float) -> Tensor:
    """[R] whether a token of the trajectory has r < threshold (Liu et al. 2025, as `rollout_token_veto_threshold` of verl 0.6).

    Example:
        r = 1, 1, 1e-5 in one trajectory, threshold 1e-4: True.
    """
    return rows.max(-log_ratio_N) > -math.log(threshold)


def effective_share(mean: float, mean_square: float) -> float:
    """Kish's effective sample size over the number of samples: (sum w)^2 / (n sum w^2), from the means of w and of w^2.

    Example:
        w = 1, 1, 2: mean 4/3, mean square 2: (16/9) / 2 = 0.889. Equal weights give 1.
    """
    return mean * mean / mean_square if mean_square > 0 else 0.0


def _is_between(statistic: Tensor, criterion: Criterion) -> Tensor:
    if criterion.lower is None:
        return statistic <= criterion.upper
    return (statistic >= math.log(criterion.lower)) & (statistic <= math.log(criterion.upper))
