"""Weights, optimizer, schedule and RNG as a torch.distributed.checkpoint folder, written whole or not at all.

Readable by another number of ranks: every tensor is stored by name with its place.
"""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from psrl.errors import CheckpointError
from psrl.training.model import PolicyModel

UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, EOFError, AttributeError, pickle.UnpicklingError, CheckpointException)
"""What torch raises for folders that are missing, cut short, garbled or of another model."""


def save_checkpoint(
    path: str | Path,
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
    *,
    is_distributed: bool,
) -> None:
    """Write beside `path`, then rename: a reader never sees half. An older folder at `path` is replaced.

    Every rank calls this with the same path.

    Raises:
        CheckpointError: The disk refused.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.tmp")
    is_first = not is_distributed or dist.get_rank() == 0
    try:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        _barrier(is_distributed)
        save(_state_of(model, optimizer, scheduler), checkpoint_id=temporary, no_dist=not is_distributed)
        if is_first:
            shutil.rmtree(target, ignore_errors=True)
            temporary.rename(target)
        _barrier(is_distributed)
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"cannot write the checkpoint {target}: {error}") from error


def load_checkpoint(
    path: str | Path,
    model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
    *,
    is_distributed: bool,
) -> None:
    """Put everything back in place.

    Raises:
        CheckpointError: The folder is missing, incomplete or of another model.
    """
    state = _state_of(model, optimizer, scheduler)
    try:
        load(state, checkpoint_id=Path(path), no_dist=not is_distributed)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        scheduler.load_state_dict(state["scheduler"] | {"lr_lambdas": [None]})
        torch.set_rng_state(state["rng"])
    except UNREADABLE as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {type(error).__name__}: {error}") from error


def _state_of(model: PolicyModel, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LambdaLR) -> dict[str, Any]:
    has_stepped = bool(optimizer.state)
    weights, moments = get_state_dict(model, optimizer)
    if not has_stepped:
        # To make the moments, get_state_dict takes a step at learning rate 0, which would count in Adam's bias correction.
        for state in optimizer.state.values():
            state["step"].zero_()
    schedule = {name: value for name, value in scheduler.state_dict().items() if name != "lr_lambdas"}
    return {"model": weights, "optimizer": moments, "scheduler": schedule, "rng": torch.get_rng_state()}


def _barrier(is_distributed: bool) -> None:
    if is_distributed:
        dist.barrier()
