"""Which trajectory each trained token of a micro-batch belongs to.

Legend: N trained tokens of a micro-batch, rows one after another; R rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Rows:
    """Which trajectory each token belongs to, for sums over trajectories."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        """`sizes` are the trained tokens of each row, none of them 0."""
        self.sizes_R = torch.tensor(sizes, dtype=torch.int64, device=device)
        self.row_N = torch.repeat_interleave(self.sizes_R)

    def sum(self, values_N: Tensor) -> Tensor:
        """[R] in float64, in which the order of the tokens does not show."""
        return torch.zeros(len(self.sizes_R), dtype=torch.float64, device=values_N.device).index_add(0, self.row_N, values_N.double())

    def mean(self, values_N: Tensor) -> Tensor:
        """[R]."""
        return self.sum(values_N) / self.sizes_R

    def max(self, values_N: Tensor) -> Tensor:
        """[R]."""
        lowest = torch.full((len(self.sizes_R),), -math.inf, dtype=torch.float64, device=values_N.device)
        return lowest.scatter_reduce(0, self.row_N, values_N.double(), "amax")

    def spread(self, values_R: Tensor) -> Tensor:
        """[N]: each token has its row's value."""
        return values_R[self.row_N]
