"""How far the policy that sampled is from the policy that is trained, and what the correction does about it.

Divergences are KL(rollout || train), estimated from the sampled tokens, in nats per token.

Legend: N trained tokens of a micro-batch, R its rows.
"""

from __future__ import annotations

from torch import Tensor

from psrl.algorithms.correction import Correction, RolloutCorrection, bounded, divergences, effective_share
from psrl.algorithms.rows import Rows
from psrl.telemetry import names
from psrl.training.metrics import StepTotals, bins

MEAN_SQUARE = "mean_square"
"""Stat that becomes `effective_share` when the step's totals are read."""


def add_mismatch(totals: StepTotals, log_ratio_N: Tensor, *, gaps_N: Tensor, turns_N: Tensor) -> None:
    """Divergence overall, by version gap and by turn.

    The gap between engine and trainer on equal weights is of the tokens that the weights at the start of the buffer sampled; what
    older weights sampled differs because they are older.
    """
    is_fresh_N = gaps_N == 0
    totals.add_gap("train/logprob_gap", log_ratio_N[is_fresh_N].abs(), turns_N[is_fresh_N])
    log_ratio_N = bounded(log_ratio_N)
    totals.add_mean(names.MISMATCH_KL_K1, divergences(log_ratio_N, "k1"))
    k3_N = divergences(log_ratio_N, "k3")
    totals.add_mean(names.MISMATCH_KL_K3, k3_N)
    for gap, is_of_gap_N in enumerate(bins(gaps_N)):
        totals.add_mean(names.mismatch_kl_of_gap(gap), k3_N[is_of_gap_N])
    for turn, is_of_turn_N in enumerate(bins(turns_N)):
        totals.add_mean(names.mismatch_kl_of_turn(turn), k3_N[is_of_turn_N])
    totals.add_mean(names.MISMATCH_VERSION_GAP_MEAN, gaps_N)
    totals.add_maximum(names.MISMATCH_VERSION_GAP_MAX, gaps_N)
    _add_weights(totals, "ratio", log_ratio_N.exp())


def add_correction(totals: StepTotals, correction: Correction, rows: Rows, settings: RolloutCorrection) -> None:
    """Weights as the loss has them, and what was rejected; nothing while both are off."""
    if settings.has_weights:
        _add_weights(totals, "weight", correction.weights)
        totals.add_maximum(names.MISMATCH_WEIGHT_MAX_UNTRUNCATED, correction.raw_weights)
        totals.add_mean(names.MISMATCH_WEIGHT_TRUNCATED, (correction.weights != correction.raw_weights).float())
    if settings.rejects:
        is_rejected_N = (~correction.keep).float()
        totals.add_mean(names.MISMATCH_REJECTED_TOKENS, is_rejected_N)
        totals.add_mean(names.MISMATCH_REJECTED_TRAJECTORIES, rows.max(is_rejected_N))
        totals.add_mean(names.MISMATCH_VETOED_TRAJECTORIES, correction.vetoed_rows.float())


def with_effective_shares(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics with each pair of mean and mean square of weights made the share of samples that they are worth."""
    result = dict(metrics)
    for name in metrics:
        noun, _, stat = name.rpartition("/")
        if stat == MEAN_SQUARE:
            result[f"{noun}/effective_share"] = effective_share(metrics[f"{noun}/mean"], result.pop(name))
    return result


def _add_weights(totals: StepTotals, noun: str, weights_N: Tensor) -> None:
    totals.add_mean(f"mismatch/{noun}/mean", weights_N)
    totals.add_mean(f"mismatch/{noun}/{MEAN_SQUARE}", weights_N.double().square())
    totals.add_maximum(f"mismatch/{noun}/max", weights_N)
