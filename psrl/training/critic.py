"""The critic: a value model beside the policy, for advantages that need to know what a state is worth.

The value of a sampled token is that of the state in which it was chosen, so a critic reads its hidden states where the policy's head
reads its own. All ranks call every method together.

Legend: B rows, T tokens, N scored tokens of a micro-batch, n of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psrl.algorithms.losses.value import clipped_value_loss
from psrl.config.actor import ActorConfig
from psrl.config.critic import CriticConfig
from psrl.config.model import ModelConfig
from psrl.training.attention import RowLayout, hidden_states, use_rows_attention
from psrl.training.checkpoint import load_checkpoint, save_checkpoint
from psrl.training.gradients import LossWeights, add_gradients, check_finite, clip_gradients, joined, loss_weights
from psrl.training.metrics import StepTotals
from psrl.training.model import load_model
from psrl.training.optim import make_optimizer, make_scheduler
from psrl.training.packing import MicroBatch
from psrl.training.scoring import TrainRow, batch_of

FOLDER = "critic"
"""Inside a checkpoint."""
EXPLAINED_VARIANCE = "critic/explained_variance/value"
"""1 - variance(returns - values) / variance(returns): 1 knows all, 0 no more than the mean."""


class ValueModel(nn.Module):
    """A causal LM whose output embedding is a value head of one row, so that it is sharded and saved as the policy is."""

    def __init__(self, causal_lm: Any) -> None:
        """`causal_lm` is a transformers `...ForCausalLM`; its output embedding is replaced, the new one starts at 0."""
        super().__init__()
        weight = causal_lm.get_input_embeddings().weight
        head = nn.Linear(weight.shape[1], 1, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        causal_lm.config.tie_word_embeddings = False
        causal_lm.set_output_embeddings(head)
        self.causal_lm = causal_lm
        self.can_pack_rows = use_rows_attention(causal_lm)

    def forward(self, input_ids_BT: Tensor, states_N: Tensor, *, layout: RowLayout | None = None) -> Tensor:
        """[N] float32: the value of each flat hidden state `states_N` of [B * T]; a flat sequence [1, T] has a layout."""
        head = self.causal_lm.get_output_embeddings()
        hidden_NH = hidden_states(self.causal_lm.base_model, input_ids_BT, layout).index_select(0, states_N)
        return F.linear(hidden_NH, head.weight, head.bias).squeeze(-1).float()


def load_value_model(settings: CriticConfig, policy: ModelConfig, *, with_weights: bool) -> ValueModel:
    """The architecture and weights of `critic.model.path`, else of the policy. Raises ConfigError."""
    path = settings.model.path or policy.path
    return ValueModel(load_model(ModelConfig(path=path, dtype=policy.dtype), with_weights=with_weights).causal_lm)


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueTargets:
    """What the critic learns from, [n] by row key."""

    old_values: Mapping[str, Tensor]
    """At the start of the buffer."""
    returns: Mapping[str, Tensor]


class Critic:
    """Value model, its optimizer and schedule, on one rank."""

    def __init__(
        self,
        model: ValueModel,
        settings: CriticConfig,
        actor: ActorConfig,
        *,
        total_steps: int,
        device: torch.device,
        world_size: int,
        is_sharded: bool,
    ) -> None:
        """`is_sharded`: FSDP2 holds `model` already. Raises ConfigError."""
        self._model = model
        self._settings = settings
        self._actor = actor
        self._device = device
        self._world_size = world_size
        self._is_sharded = is_sharded
        optim = settings.optim
        self._optimizer = make_optimizer(
            model.parameters(),
            lr=optim.lr,
            weight_decay=optim.weight_decay,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            is_offloaded=actor.fsdp_config.optimizer_offload,
        )
        self._scheduler = make_scheduler(
            self._optimizer,
            schedule=optim.lr_scheduler_type,
            warmup_steps=optim.lr_warmup_steps,
            total_steps=total_steps,
            min_ratio=optim.min_lr_ratio,
        )

    @torch.no_grad()
    def values(self, batches: Sequence[MicroBatch[TrainRow]]) -> dict[str, Tensor]:
        """[n] on the CPU of each row, by key; every rank has the same number of micro-batches."""
        values: dict[str, Tensor] = {}
        for batch in batches:
            values_N = self._values_of(batch).cpu()
            parts = values_N.split([len(row.turns) for row in batch.rows]) if batch.rows else ()
            values.update({row.key: part for row, part in zip(batch.rows, parts, strict=True)})
        return values

    def learn(self, mini_batches: Sequence[Sequence[MicroBatch[TrainRow]]], targets: ValueTargets, totals: StepTotals) -> dict[str, float]:
        """One update for each mini-batch and epoch; metrics that are no sums over tokens.

        Raises:
            TrainingError: A loss or gradient is not finite.
        """
        for batch in [batch for batches in mini_batches for batch in batches]:
            self._measure(batch, targets, totals)
        epochs = self._settings.ppo_epochs or self._actor.ppo_epochs
        norms = [self._update(batches, targets, totals) for _ in range(epochs) for batches in mini_batches]
        lr = float(self._scheduler.get_last_lr()[0])
        self._scheduler.step()
        return {"critic/grad_norm/mean": sum(norms) / len(norms), "critic/lr/value": lr, "critic/updates/count": float(len(norms))}

    def save(self, checkpoint: Path) -> None:
        """Into the policy's checkpoint, which is there already. Raises CheckpointError."""
        save_checkpoint(checkpoint / FOLDER, self._model, self._optimizer, self._scheduler, is_distributed=self._is_sharded)

    def load(self, checkpoint: Path) -> None:
        """What `save` wrote. Raises CheckpointError."""
        load_checkpoint(checkpoint / FOLDER, self._model, self._optimizer, self._scheduler, is_distributed=self._is_sharded)

    def _values_of(self, batch: MicroBatch[TrainRow]) -> Tensor:
        inputs, _ = batch_of(batch, self._device)
        values_N: Tensor = self._model(inputs.input_ids, inputs.states, layout=inputs.layout)
        return values_N

    def _update(self, batches: Sequence[MicroBatch[TrainRow]], targets: ValueTargets, totals: StepTotals) -> float:
        weights = loss_weights(batches, self._actor, device=self._device, world_size=self._world_size)
        self._optimizer.zero_grad(set_to_none=True)
        loss = add_gradients(
            self._model,
            batches,
            lambda batch: self._micro_batch_loss(batch, weights, targets, totals),
            device=self._device,
            world_size=self._world_size,
        )
        grad_norm = clip_gradients(self._model, self._settings.grad_clip)
        check_finite(self._model, self._optimizer, grad_norm=grad_norm, loss=loss)
        self._optimizer.step()
        return grad_norm

    def _micro_batch_loss(self, batch: MicroBatch[TrainRow], weights: LossWeights, targets: ValueTargets, totals: StepTotals) -> Tensor:
        outputs = clipped_value_loss(
            self._values_of(batch),
            self._of(batch, targets.old_values),
            self._of(batch, targets.returns),
            cliprange_value=self._settings.cliprange_value,
        )
        totals.add_mean("critic/loss/mean", outputs.values)
        for name, metric_N in outputs.means.items():
            totals.add_mean(f"critic/{name}", metric_N)
        return (outputs.values * self._of(batch, weights.raw)).sum() / weights.total

    def _measure(self, batch: MicroBatch[TrainRow], targets: ValueTargets, totals: StepTotals) -> None:
        returns_N = self._of(batch, targets.returns).double()
        errors_N = returns_N - self._of(batch, targets.old_values)
        for noun, values_N in (("return", returns_N), ("error", errors_N)):
            totals.add_mean(f"critic/{noun}/mean", values_N)
            totals.add_mean(f"critic/{noun}/mean_of_squares", values_N.square())

    def _of(self, batch: MicroBatch[TrainRow], by_key: Mapping[str, Tensor]) -> Tensor:
        return joined([by_key[row.key] for row in batch.rows], self._device)


def with_explained_variance(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics with the mean squares of `Critic.learn` made the share of the returns' variance that the values explain."""
    if "critic/return/mean_of_squares" not in metrics:
        return metrics
    result = dict(metrics)
    variances = [result.pop(f"critic/{noun}/mean_of_squares") - metrics[f"critic/{noun}/mean"] ** 2 for noun in ("return", "error")]
    result[EXPLAINED_VARIANCE] = 1 - variances[1] / variances[0] if variances[0] > 0 else 0.0
    return result
