"""Sums, counts and maxima that micro-batches and ranks add up to; one collective per training step.

Invariant: every rank adds the same names, a rank without rows included.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

MAX_BINS = 8
"""Turns, and version gaps, from the last of these on share its metric, so that long episodes do not make hundreds of curves."""


def bins(numbers_N: Tensor) -> list[Tensor]:
    """[N] for each of `MAX_BINS` numbers which tokens have it; the last has all further numbers too."""
    binned_N = numbers_N.clamp(max=MAX_BINS - 1)
    return [binned_N == number for number in range(MAX_BINS)]


class StepTotals:
    """Accumulates on the device without waiting for it; `read` reads once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add_mean(self, name: str, values_N: Tensor) -> None:
        """Values whose mean over everything is reported as `name`."""
        self._sums[name] = self._sums.get(name, self._zero()) + values_N.detach().double().sum()
        self._counts[name] = self._counts.get(name, self._zero()) + len(values_N)

    def add_sum(self, name: str, value: Tensor) -> None:
        """A part of a sum reported as `name`."""
        self._sums[name] = self._sums.get(name, self._zero()) + value.detach().double()
        self._counts.setdefault(name, self._zero() - 1)

    def add_maximum(self, name: str, values_N: Tensor) -> None:
        """Values whose maximum is reported as `name`; none are negative."""
        nothing = self._zero() - 1
        largest = values_N.detach().double().max() if len(values_N) else nothing
        self._maxima[name] = torch.maximum(self._maxima.get(name, nothing), largest)

    def add_gap(self, noun: str, gap_N: Tensor, turns_N: Tensor) -> None:
        """Mean and maximum of a gap, overall and for each turn."""
        self.add_mean(f"{noun}/mean", gap_N)
        self.add_maximum(f"{noun}/max", gap_N)
        for turn, is_of_turn_N in enumerate(bins(turns_N)):
            self.add_mean(f"{noun}/mean_turn{turn}", gap_N[is_of_turn_N])
            self.add_maximum(f"{noun}/max_turn{turn}", gap_N[is_of_turn_N])

    def read(self, *, is_distributed: bool) -> dict[str, float]:
        """All metrics over all ranks; a mean or a maximum over nothing is left out."""
        names, maxima_names = sorted(self._sums), sorted(self._maxima)
        sums = torch.stack([self._sums[name] for name in names] + [self._counts[name].clamp(min=0) for name in names])
        maxima = torch.stack([self._maxima[name] for name in maxima_names] or [self._zero()])
        if is_distributed:
            dist.all_reduce(sums, op=dist.ReduceOp.SUM)
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        totals, counts = sums.cpu().view(2, len(names))
        result = {}
        for index, name in enumerate(names):
            is_plain_sum = bool(self._counts[name] < 0)
            if is_plain_sum or counts[index] > 0:
                result[name] = float(totals[index]) if is_plain_sum else float(totals[index] / counts[index])
        for index, name in enumerate(maxima_names):
            if maxima[index] >= 0:
                result[name] = float(maxima[index])
        return result

    def _zero(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._device)
