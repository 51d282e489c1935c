"""What the updates of policy and critic share: weights of tokens over all ranks, clipping, and the guard against what is not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from psrl.algorithms.aggregate import aggregation_mode, count, raw_weights
from psrl.config.actor import ActorConfig
from psrl.errors import TrainingError
from psrl.training.packing import MicroBatch
from psrl.training.scoring import TrainRow


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
