"""Weights, optimizer, schedule and RNG as a torch.distributed.checkpoint folder, written whole or not at all.

Readable by another number of ranks: every tensor is stored by name with its place. Frozen weights are not in it: with an adapter it is
as small as the adapter. What the settings say of the optimizer (learning rate, weight decay, ...) is not in it either, so that a resume
goes on with the settings that it is given.
"""

from __future__ import annotations

import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from psrl.errors import CheckpointError

UNREADABLE = (OSError, RuntimeError, ValueError, KeyError, EOFError, AttributeError, pickle.UnpicklingError, CheckpointException)
"""What torch raises for folders that are missing, cut short, garbled or of another model."""

TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)
"""`load` itself refuses a checkpoint that lacks a trained tensor."""


def save_checkpoint(
    path: str | Path,
    model: torch.nn.Module,
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
        torch.save(rng_state(), temporary / _rng_file(dist.get_rank() if is_distributed else 0))
        _barrier(is_distributed)
        if is_first:
            shutil.rmtree(target, ignore_errors=True)
            temporary.rename(target)
        _barrier(is_distributed)
    except (OSError, RuntimeError, CheckpointException) as error:
        # torch's own writer says RuntimeError, and nothing of the disk, where it is full.
        free_mib = shutil.disk_usage(target.parent).free / 2**20 if target.parent.exists() else 0.0
        raise CheckpointError(f"cannot write the checkpoint {target} ({free_mib:.0f} MiB are free on its disk): {error}") from error


def load_checkpoint(
    path: str | Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LambdaLR,
    *,
    is_distributed: bool,
) -> None:
    """Put everything back in place; learning rate, weight decay and the like stay as the optimizer has them now.

    Raises:
        CheckpointError: The folder is missing, incomplete or of another model.
    """
    options = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    state = _state_of(model, optimizer, scheduler)
    try:
        load(state, checkpoint_id=Path(path), no_dist=not is_distributed)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=TRAINED)
        for group, own in zip(optimizer.param_groups, options, strict=True):
            group.update(own)
        _go_on(scheduler, num_steps=int(state["steps"]))
        set_rng_state(torch.load(Path(path) / rng_file_of(Path(path), dist.get_rank() if is_distributed else 0), weights_only=True))
    except UNREADABLE as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {type(error).__name__}: {error}") from error


def rng_state() -> dict[str, Any]:
    """Of every random generator that a loss or an advantage of the user's may draw from: torch, CUDA, numpy, Python."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, next_gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), int(position), int(has_gauss), float(gauss)),
        "python": (version, torch.tensor(words, dtype=torch.int64), next_gauss),
    }


def set_rng_state(state: dict[str, Any]) -> None:
    """What `rng_state` gave; states of CUDA devices that are not here are left out."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, words, next_gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), next_gauss))


def _go_on(scheduler: torch.optim.lr_scheduler.LambdaLR, *, num_steps: int) -> None:
    """The schedule of the settings, at the step of the checkpoint."""
    scheduler.last_epoch = num_steps
    rates = [base * rate_of(num_steps) for base, rate_of in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)]
    for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    scheduler._last_lr = list(rates)


def _rng_file(rank: int) -> str:
    return f"rng-{rank}.pt"


def rng_file_of(folder: Path, rank: int) -> str:
    """This rank's own state; of more ranks than were saved, the later ones take the first ones' again."""
    num_saved = len(list(folder.glob("rng-*.pt")))
    return _rng_file(rank % num_saved if num_saved else rank)


def _state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LambdaLR) -> dict[str, Any]:
    has_stepped = bool(optimizer.state)
    weights, moments = get_state_dict(model, optimizer, options=TRAINED)
    if not has_stepped:
        # To make the moments, get_state_dict takes a step at learning rate 0, which would count in Adam's bias correction.
        for state in optimizer.state.values():
            state["step"].zero_()
    # get_state_dict leaves frozen weights out by one name each; tied ones have two.
    frozen = {name for name, parameter in model.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    weights = {name: tensor for name, tensor in weights.items() if name not in frozen}
    return {"model": weights, "optimizer": moments, "steps": scheduler.last_epoch}


def _barrier(is_distributed: bool) -> None:
    if is_distributed:
        dist.barrier()
