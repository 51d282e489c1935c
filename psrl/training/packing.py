"""Rows grouped into micro-batches by tokens, equally for every rank, and the padded tensors of one micro-batch.

Rows of similar length share a right-padded [B, T] batch. With causal attention no real token can see padding at its right, so no
mask is needed and the fast attention kernel is used; padding is never scored, so it enters neither the loss nor a count.

Legend: B rows, T longest row of the micro-batch, N scored tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from psrl.errors import RowTooLongError

MIN_FILL = 0.8
"""A row shorter than this share of the longest of its micro-batch opens a new one: padding costs more than a further batch."""
MIN_BATCH_TOKENS = 2048
"""Micro-batches smaller than this are not closed for the sake of padding: the fixed cost of a forward would exceed it."""


class Sized(Protocol):
    """Anything whose number of tokens is its `len`."""

    def __len__(self) -> int: ...


Row = TypeVar("Row", bound=Sized)


@dataclass(frozen=True, slots=True)
class MicroBatch(Generic[Row]):
    """Rows that go through the model together."""

    rows: tuple[Row, ...]
    """Empty for the all-masked micro-batch of a rank that has nothing left to do."""

    @property
    def num_padded_tokens(self) -> int:
        """B times T."""
        return len(self.rows) * max((len(row) for row in self.rows), default=0)


def pack(rows: Sequence[Row], *, max_tokens: int, num_ranks: int) -> list[list[MicroBatch[Row]]]:
    """Group rows into equal work for every rank.

    Args:
        rows: Each of length L <= max_tokens. Order is kept within a micro-batch.
        max_tokens: Most tokens in one micro-batch, padding included.
        num_ranks: Data-parallel ranks that step together.

    Returns:
        [num_steps][num_ranks] micro-batches; all ranks have the same num_steps, a short one gets an
        all-masked micro-batch (no rows). The longest come first, so that running out of memory shows at once.

    Raises:
        RowTooLongError: A row exceeds max_tokens; nothing is cut in silence.

    Example:
        Lengths [6, 3, 3], max_tokens=6, num_ranks=2 -> one step: [[6], [3 + 3]].
    """
    lengths = [len(row) for row in rows]
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise RowTooLongError(f"row {index} has {length} tokens, a micro-batch holds {max_tokens}: raise ppo_max_token_len_per_gpu")
    bins = _split_for_ranks(_fill(lengths, max_tokens), lengths, num_ranks)
    bins.sort(key=lambda indices: -_padded(indices, lengths))
    bins += [[] for _ in range(-len(bins) % num_ranks)]
    batches = [MicroBatch(tuple(rows[index] for index in sorted(indices))) for indices in bins]
    return [batches[start : start + num_ranks] for start in range(0, len(batches), num_ranks)]


def _padded(indices: Sequence[int], lengths: Sequence[int]) -> int:
    return len(indices) * max(lengths[index] for index in indices) if indices else 0


def _fill(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Longest first; a batch is closed when it is full, or when the next row would be mostly padding."""
    bins: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        is_full = not bins or (len(bins[-1]) + 1) * width > max_tokens
        is_wasteful = bool(bins) and lengths[index] < MIN_FILL * width and len(bins[-1]) * width >= MIN_BATCH_TOKENS
        if is_full or is_wasteful:
            bins.append([])
            width = lengths[index]
        bins[-1].append(index)
    return bins


def _split_for_ranks(bins: list[list[int]], lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Halve the largest batches until the ranks have equally many, where there are rows enough."""
    wanted = math.ceil(len(bins) / num_ranks) * num_ranks
    while len(bins) < wanted:
        largest = max((b for b in bins if len(b) > 1), key=lambda indices: _padded(indices, lengths), default=None)
        if largest is None:
            break
        half = len(largest) // 2
        bins.remove(largest)
        bins += [largest[:half], largest[half:]]
    return bins


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedBatch:
    """The tensors of one micro-batch, with the tokens to score picked out."""

    input_ids: Tensor  # [B, T]
    states: Tensor  # [N]
    """Flat index (row * T + position) of the hidden state that predicts each scored token: the position before it."""
    chosen: Tensor  # [N]
    """The scored token ids."""


def pad(rows: Sequence[tuple[Tensor, Tensor]], *, device: torch.device | str = "cpu") -> PaddedBatch:
    """Right-pad rows of (ids [L], mask [L]); the tokens with mask != 0 are scored, row by row in order.

    No rows give one dummy row without anything to score. The first token of a row has no state before it and must have mask 0.
    """
    if not rows:
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        return PaddedBatch(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), states=empty, chosen=empty)
    width = max(len(ids) for ids, _ in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, (ids, row_mask) in enumerate(rows):
        input_ids[index, : len(ids)] = ids
        mask[index, : len(ids)] = row_mask != 0
    assert not mask[:, 0].any(), "the first token of a row cannot be trained on: nothing predicts it"
    positions = mask.view(-1).nonzero().squeeze(1)
    return PaddedBatch(input_ids=input_ids.to(device), states=(positions - 1).to(device), chosen=input_ids.view(-1)[positions].to(device))
