"""What the updates of policy and critic share: weights of tokens over all ranks, gradients of micro-batches, clipping, and the guard
against what is not finite. Fine-tuning shares the gradients and the clipping."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from psrl.algorithms.aggregate import aggregation_mode, count, raw_weights
from psrl.config.actor import ActorConfig
from psrl.errors import TrainingError
from psrl.training.packing import MicroBatch
from psrl.training.scoring import TrainRow
from psrl.training.sharding import reduce_over_copies

Batch = TypeVar("Batch")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossWeights:
    """Of one optimizer update, fixed before its first forward pass."""

    raw: Mapping[str, Tensor]
    """[n] by row key, of this rank's rows."""
    total: float
    """What they are divided by: over all rows of all ranks."""


def loss_weights(batches: Sequence[MicroBatch[TrainRow]], settings: ActorConfig, *, device: torch.device, world_size: int) -> LossWeights:
    """Weights as `actor.loss_agg_mode` has them; every rank calls this together.

    Raises:
        TrainingError: No rank has a token to train on.
    """
    mode = aggregation_mode(settings.loss_agg_mode)
    raw = {row.key: raw_weights(mode, row.turns, length=settings.loss_scale_factor) for batch in batches for row in batch.rows}
    total = torch.tensor(sum(count(mode, each) for each in raw.values()), dtype=torch.float64, device=device)
    if world_size > 1:
        dist.all_reduce(total)
    if float(total) == 0:
        raise TrainingError("the optimizer step has no token to train on: every trajectory is masked")
    return LossWeights(raw=raw, total=float(total))


def add_gradients(
    model: nn.Module, batches: Sequence[Batch], loss_of: Callable[[Batch], Tensor], *, device: torch.device | str, world_size: int
) -> Tensor:
    """Forward and backward passes of one update, `loss_of` each of its micro-batches; the sum of these losses.

    Every rank has equally many of them, empty ones too, because a backward pass is a collective. The loss is a sum over the ranks as well,
    of which this is one rank's part.
    """
    loss = torch.zeros((), device=device)
    for number, batch in enumerate(batches, start=1):
        reduce_over_copies(model, is_last=number == len(batches))
        part = loss_of(batch)
        # FSDP2 averages gradients over ranks.
        torch.autograd.backward(part * world_size)
        loss += part.detach()
    return loss


def clip_gradients(model: Any, max_norm: float) -> float:
    """Scale the gradients down to `max_norm`; the norm before, over all ranks."""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def check_finite(model: Any, optimizer: torch.optim.Optimizer, *, grad_norm: float, loss: Tensor) -> None:
    """Refuse an update that would break the weights. The norm is over all ranks, so all of them raise together.

    Raises:
        TrainingError: It is not finite; the weights are untouched.
    """
    if torch.isfinite(torch.tensor(grad_norm)):
        return
    optimizer.zero_grad(set_to_none=True)
    broken = []
    for name, parameter in model.causal_lm.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not torch.isfinite(local).all():
            broken.append(name)
    cause = f"weights that are not finite before the update: {', '.join(broken[:5])}" if broken else "weights were finite before"
    raise TrainingError(f"gradient norm is {grad_norm} (this rank's loss: {float(loss)}); {cause}; the update was not taken")


def joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """[N] from [n] of each row."""
    return torch.cat(list(parts)).to(device) if parts else torch.zeros(0, device=device)
