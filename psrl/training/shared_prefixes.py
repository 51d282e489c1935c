"""Rows behind one another in one flat sequence, and which of them share their beginning.

Rows whose leading ids are equal (a group's prompt, the turns before a branch) have those tokens there once: their hidden states are
the same in every row, and the gradients that the rows give them add up. Which rows share is found from the ids alone.

Legend: T all tokens of the flat sequence, R rows, L tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from psrl.training.attention import RowLayout, Segment

MIN_SHARED_TOKENS = 8
"""A shorter common beginning is computed in every row: an attention with a prefix costs more than it saves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlatRows:
    """Rows in one flat sequence."""

    ids: Tensor  # [T]
    places: list[Tensor]  # [R][L]
    """Where in the flat sequence each token of each row lies."""
    layout: RowLayout


def lay_out_rows(rows: Sequence[Tensor], *, shares: bool, device: torch.device) -> FlatRows:
    """Lay out ids [L] of at least one row; with `shares`, common beginnings once.

    Example:
        [5, 6, 7, 1] and [5, 6, 7, 2, 3], were three tokens enough to share: flat [5, 6, 7, 1, 2, 3], places [0, 1, 2, 3] and
        [0, 1, 2, 4, 5].
    """
    families = shared_beginnings([row.numpy() for row in rows]) if shares else [([index], 0) for index in range(len(rows))]
    parts: list[Tensor] = []
    segments: list[Segment] = []
    places: dict[int, Tensor] = {}
    end = 0
    for members, num_shared in families:
        prefix_start = end
        if num_shared:
            parts.append(rows[members[0]][:num_shared])
            segments.append(Segment(prefix_start, num_shared))
            end += num_shared
        for index in members:
            own = rows[index][num_shared:]
            parts.append(own)
            segments.append(Segment(end, len(own), prefix_start if num_shared else 0, num_shared))
            before = torch.arange(prefix_start, prefix_start + num_shared)
            places[index] = torch.cat((before, torch.arange(end, end + len(own))))
            end += len(own)
    layout = RowLayout(segments=tuple(segments), device=device)
    return FlatRows(ids=torch.cat(parts), places=[places[index] for index in range(len(rows))], layout=layout)


def shared_beginnings(rows: Sequence[np.ndarray]) -> list[tuple[list[int], int]]:
    """Every row in one family, with how many leading ids its members share (0: nothing, they only stand together).

    In sorted order rows that share are neighbours; of all divisions of that order this is the one that saves most tokens. Each row keeps
    a token of its own. Families come in the order of their first row.
    """
    order = sorted(range(len(rows)), key=lambda index: rows[index].astype(">i8").tobytes())  # big-endian bytes sort as the ids do
    lengths = np.array([len(rows[index]) for index in order])
    common = np.array([_num_common(rows[a], rows[b]) for a, b in pairwise(order)], np.int64)
    best, start_of = np.zeros(len(order) + 1, np.int64), np.zeros(len(order) + 1, np.int64)
    for end in range(1, len(order) + 1):
        # A family of rows start..end-1 shares the least of its neighbours' common ids, and no more than its shortest row less one.
        shared = np.minimum(lengths[:end], np.append(common[: end - 1] + 1, 2**62)) - 1
        shared = np.minimum.accumulate(shared[::-1])[::-1]
        shared[shared < MIN_SHARED_TOKENS] = 0
        saved = best[:end] + shared * np.arange(end - 1, -1, -1)
        start_of[end] = saved.argmax()
        best[end] = saved[start_of[end]]
    families: list[tuple[list[int], int]] = []
    end = len(order)
    while end:
        start = int(start_of[end])
        members = sorted(order[start:end])
        num_shared = int(min(lengths[start:end].min() - 1, common[start : end - 1].min())) if end - start > 1 else 0
        families.append((members, num_shared) if num_shared >= MIN_SHARED_TOKENS else (members, 0))
        end = start
    return sorted(families)


def _num_common(a: np.ndarray, b: np.ndarray) -> int:
    """Leading ids that two rows have alike."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
