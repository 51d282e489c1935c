"""One optimizer update: forward, loss, backward over micro-batches, clipping, the guard, AdamW.

The trainer does not branch on the algorithm: it gathers one value per trained token, asks the named loss, and adds the
optional KL and entropy terms under the same weights. Importance weights are of the policy's loss alone; a
rejected token loses all its terms.

Legend: n trained tokens of a row, N of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from psrl.algorithms.aggregate import aggregation_mode
from psrl.algorithms.correction import Correction, RolloutCorrection, bounded
from psrl.algorithms.kl import kl_estimator
from psrl.algorithms.losses import LossInputs, policy_losses
from psrl.algorithms.rows import Rows
from psrl.config.actor import ActorConfig
from psrl.config.rollout_correction import RolloutCorrectionConfig
from psrl.training.gradients import LossWeights, add_gradients, check_finite, clip_gradients, joined, loss_weights
from psrl.training.metrics import StepTotals
from psrl.training.mismatch import add_correction, add_mismatch
from psrl.training.model import PolicyModel
from psrl.training.packing import MicroBatch
from psrl.training.scoring import TrainRow, batch_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """What an update needs of its rows beside themselves: [n] by row key."""

    advantages: Mapping[str, Tensor]
    proximal: Mapping[str, Tensor] | None
    """Logprobs of the weights at the start of the buffer; None takes those in training, which are the same before the first update."""
    ref: Mapping[str, Tensor] | None
    """Logprobs of the frozen reference; None without a KL term."""
    measures_mismatch: bool
    """Whether `proximal` is of the start of the buffer, and the rows were not measured yet."""


class OptimizerStep:
    """Runs updates on one rank. All ranks call it together with the same number of micro-batches."""

    def __init__(
        self,
        model: PolicyModel,
        optimizer: torch.optim.Optimizer,
        settings: ActorConfig,
        correction: RolloutCorrectionConfig,
        *,
        device: torch.device,
        world_size: int,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._settings = settings
        self._device = device
        self._world_size = world_size
        self._loss = policy_losses.resolve(settings.policy_loss)
        self._kl = kl_estimator(settings.kl_loss_type)
        aggregation_mode(settings.loss_agg_mode)  # an unknown name is refused now, not in the first update
        self._correction = RolloutCorrection(correction)

    def run(self, batches: Sequence[MicroBatch[TrainRow]], reference: Reference, totals: StepTotals) -> float:
        """Update once and return the gradient norm before clipping.

        Raises:
            TrainingError: No rank has a token to train on, or loss or gradient is not finite; the weights are then untouched.
        """
        weights = loss_weights(batches, self._settings, device=self._device, world_size=self._world_size)
        self._optimizer.zero_grad(set_to_none=True)
        loss = add_gradients(
            self._model,
            batches,
            lambda batch: self._micro_batch_loss(batch, weights, reference, totals),
            device=self._device,
            world_size=self._world_size,
        )
        totals.add_sum("train/loss/value", loss)
        grad_norm = clip_gradients(self._model, self._settings.grad_clip)
        check_finite(self._model, self._optimizer, grad_norm=grad_norm, loss=loss)
        self._optimizer.step()
        return grad_norm

    def _micro_batch_loss(self, batch: MicroBatch[TrainRow], weights: LossWeights, reference: Reference, totals: StepTotals) -> Tensor:
        settings, rows = self._settings, batch.rows
        layout = Rows([len(row.turns) for row in rows], self._device)
        batched, temperatures_N = batch_of(batch, self._device)
        logprobs_N, entropy_N = self._model(
            batched.input_ids,
            batched.states,
            batched.chosen,
            temperatures_N,
            layout=batched.layout,
            entropy_needs_grad=settings.entropy_coeff != 0,
        )
        rollout_N = self._join([row.rollout_logprobs for row in rows])
        proximal_N = logprobs_N.detach() if reference.proximal is None else self._join([reference.proximal[row.key] for row in rows])
        old_N = rollout_N if settings.old_logprobs == "rollout" else proximal_N
        inputs = LossInputs(
            logprobs=logprobs_N,
            old_logprobs=old_N,
            rollout_logprobs=rollout_N,
            advantages=self._join([reference.advantages[row.key] for row in rows]),
            rows=layout,
        )
        outputs = self._loss(inputs, settings)
        correction = self._corrected(rows, layout, proximal_N - rollout_N, reference, totals)
        values_N = outputs.values * correction.weights
        if reference.ref is not None:
            kl_N = self._kl(logprobs_N, self._join([reference.ref[row.key] for row in rows]))
            values_N = values_N + settings.kl_loss_coef * kl_N
            totals.add_mean("train/ref_kl/mean", kl_N)
        if settings.entropy_coeff != 0:
            values_N = values_N - settings.entropy_coeff * entropy_N
        for name, metric_N in outputs.means.items():
            totals.add_mean(f"train/{name}", metric_N)
        log_ratio_N = bounded((logprobs_N - old_N).detach())
        totals.add_mean("train/entropy/mean", entropy_N)
        totals.add_mean("train/ratio/mean", log_ratio_N.exp())
        totals.add_maximum("train/ratio/max", log_ratio_N.exp())
        totals.add_mean("train/old_kl/mean", -log_ratio_N)
        weights_N = self._join([weights.raw[row.key] for row in rows]) * correction.keep
        return (values_N * weights_N).sum() / weights.total

    def _corrected(
        self, batch_rows: Sequence[TrainRow], layout: Rows, log_ratio_N: Tensor, reference: Reference, totals: StepTotals
    ) -> Correction:
        """Weights and rejections of a micro-batch, with their metrics."""
        correction = self._correction(log_ratio_N, layout)
        add_correction(totals, correction, layout, self._correction)
        if reference.measures_mismatch:
            gaps_N, turns_N = self._join([row.version_gaps for row in batch_rows]), self._join([row.turns for row in batch_rows])
            add_mismatch(totals, log_ratio_N, gaps_N=gaps_N, turns_N=turns_N)
        return correction

    def _join(self, parts: Sequence[Tensor]) -> Tensor:
        return joined(parts, self._device)
