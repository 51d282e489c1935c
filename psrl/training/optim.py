"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from psrl.errors import ConfigError

SCHEDULES = ("constant", "linear", "cosine")
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's state of a parameter, but for its step count, which the fused kernel wants on the device."""


def lr_factor(step: int, *, schedule: str, warmup_steps: int, total_steps: int, min_ratio: float) -> float:
    """Share of the full learning rate at `step`, counted from 0.

    The warm-up climbs linearly and never gives 0: with 4 warm-up steps the shares are 1/4, 2/4, 3/4, 1. Afterwards `constant` stays,
    `linear` and `cosine` fall to `min_ratio` at the last step.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - 1 - warmup_steps))
    fall = progress if schedule == "linear" else (1 - math.cos(math.pi * progress)) / 2
    return 1.0 - (1.0 - min_ratio) * fall


def make_optimizer(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    is_offloaded: bool = False,
) -> torch.optim.AdamW:
    """AdamW with one pass over each parameter (`fused`), the fastest on CPU and CUDA alike.

    `is_offloaded`: the moments lie in the host's memory between updates.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    kind = OffloadedAdamW if is_offloaded else torch.optim.AdamW
    return kind(trained, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, fused=True)


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW whose moments are on the parameters' device during `step` only."""

    def step(self, closure: Any = None) -> Any:
        """Fetch the moments, update, and put them back."""
        self._move(lambda parameter: parameter.device)
        try:
            return super().step(closure)
        finally:
            self._move(lambda parameter: torch.device("cpu"))

    def _move(self, place_of: Callable[[Tensor], torch.device]) -> None:
        for parameter, state in self.state.items():
            for name in MOMENTS:
                state[name] = state[name].to(place_of(parameter))


def make_scheduler(
    optimizer: torch.optim.Optimizer, *, schedule: str, warmup_steps: int, total_steps: int, min_ratio: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """`lr_factor` as a torch scheduler; stepped once per training step.

    Raises:
        ConfigError: Unknown schedule.
    """
    if schedule not in SCHEDULES:
        fix = f"use one of {', '.join(SCHEDULES)}"
        raise ConfigError(key="actor.optim.lr_scheduler_type", value=schedule, rule="unknown schedule", fix=fix)

    def factor(step: int) -> float:
        return lr_factor(step, schedule=schedule, warmup_steps=warmup_steps, total_steps=total_steps, min_ratio=min_ratio)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
