"""Rows grouped into micro-batches by tokens, equally for every rank, and the tensors of one micro-batch.

How the rows of a micro-batch lie in memory is its arrangement. `packed`: behind one another in one flat sequence without padding
(`attention.py` keeps them apart). `shared`: as packed, and what rows begin with alike, such as the prompt of a group, stands there once.
`padded`: right-padded [B, T]; with causal attention no real token can see padding at its right, so no mask is needed. In all of them
padding is never scored, so it enters neither the loss nor a count.

Legend: B rows, T longest row of a padded micro-batch or all tokens of a flat one, N scored tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from psrl.errors import RowTooLongError
from psrl.training.attention import RowLayout
from psrl.training.shared_prefixes import lay_out_rows

_SizeOf = Callable[[Sequence[int], Sequence[int]], int]
"""(indices of rows, lengths of all rows) -> tokens of a micro-batch of these rows."""
MIN_FILL = 0.8
"""A row shorter than this share of the longest of its padded micro-batch opens a new one: padding costs more than a further batch."""
MIN_BATCH_TOKENS = 2048
"""Micro-batches smaller than this are not closed for the sake of padding: the fixed cost of a forward would exceed it."""


class Arrangement(StrEnum):
    """How rows of a micro-batch lie in memory."""

    PADDED = "padded"
    PACKED = "packed"
    SHARED = "shared"


def arrangement_of(*, use_remove_padding: bool, use_prefix_grouper: bool) -> Arrangement:
    """The one that the settings of these names ask for."""
    if not use_remove_padding:
        return Arrangement.PADDED
    return Arrangement.SHARED if use_prefix_grouper else Arrangement.PACKED


class Sized(Protocol):
    """Anything whose number of tokens is its `len`."""

    def __len__(self) -> int: ...


Row = TypeVar("Row", bound=Sized)


@dataclass(frozen=True, slots=True)
class MicroBatch(Generic[Row]):
    """Rows that go through the model together."""

    rows: tuple[Row, ...]
    """Empty for the all-masked micro-batch of a rank that has nothing left to do."""
    arrangement: Arrangement = Arrangement.PADDED

    @property
    def num_padded_tokens(self) -> int:
        """B times T, what a padded one holds."""
        return len(self.rows) * max((len(row) for row in self.rows), default=0)


def pack(
    rows: Sequence[Row],
    *,
    max_tokens: int,
    num_ranks: int,
    arrangement: Arrangement = Arrangement.PADDED,
    groups: Sequence[Hashable] | None = None,
) -> list[list[MicroBatch[Row]]]:
    """Group rows into equal work for every rank.

    Args:
        rows: Each of length L <= max_tokens. Order is kept within a micro-batch.
        max_tokens: Most tokens in one micro-batch, padding included. What rows share counts for each of them.
        num_ranks: Data-parallel ranks that step together.
        arrangement: Of every micro-batch.
        groups: Of each row; rows of one group are kept together where it makes sense, which is when they share their beginning.

    Returns:
        [num_steps][num_ranks] micro-batches; all ranks have the same num_steps, a short one gets an
        all-masked micro-batch (no rows). The largest come first, so that running out of memory shows at once.

    Raises:
        RowTooLongError: A row exceeds max_tokens; nothing is cut in silence.

    Example:
        Lengths [6, 3, 3], max_tokens=6, num_ranks=2 -> one step: [[6], [3 + 3]].
    """
    lengths = [len(row) for row in rows]
    for index, length in enumerate(lengths):
        if length > max_tokens:
            raise RowTooLongError(f"row {index} has {length} tokens, a micro-batch holds {max_tokens}: raise ppo_max_token_len_per_gpu")
    size_of = _padded if arrangement is Arrangement.PADDED else _exact
    if arrangement is Arrangement.PADDED:
        bins = _fill_padded(lengths, max_tokens)
    else:
        bins = _fill_exact(_in_groups(lengths, groups if arrangement is Arrangement.SHARED else None), lengths, max_tokens)
    bins = _split_for_ranks(bins, lengths, num_ranks, size_of)
    bins.sort(key=lambda indices: -size_of(indices, lengths))
    bins += [[] for _ in range(-len(bins) % num_ranks)]
    batches = [MicroBatch(tuple(rows[index] for index in sorted(indices)), arrangement) for indices in bins]
    return [batches[start : start + num_ranks] for start in range(0, len(batches), num_ranks)]


def _padded(indices: Sequence[int], lengths: Sequence[int]) -> int:
    return len(indices) * max(lengths[index] for index in indices) if indices else 0


def _exact(indices: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[index] for index in indices)


def _fill_padded(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
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


def _in_groups(lengths: Sequence[int], groups: Sequence[Hashable] | None) -> list[int]:
    """Indices, longest first, or group by group with the group of the longest row first."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    if groups is None:
        return order
    by_group: dict[Hashable, list[int]] = {}
    for index in order:
        by_group.setdefault(groups[index], []).append(index)
    return [index for members in by_group.values() for index in members]


def _fill_exact(order: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """In this order; a batch is closed when it is full, at even sizes: as few batches as the limit allows share the tokens equally."""
    total = sum(lengths)
    wanted = total / max(1, math.ceil(total / max_tokens))
    bins: list[list[int]] = []
    size = 0
    for index in order:
        if not bins or size + lengths[index] > max_tokens or size >= wanted:
            bins.append([])
            size = 0
        bins[-1].append(index)
        size += lengths[index]
    return bins


def _split_for_ranks(bins: list[list[int]], lengths: Sequence[int], num_ranks: int, size_of: _SizeOf) -> list[list[int]]:
    """Halve the largest batches until the ranks have equally many, where there are rows enough."""
    wanted = math.ceil(len(bins) / num_ranks) * num_ranks
    while len(bins) < wanted:
        largest = max((b for b in bins if len(b) > 1), key=lambda indices: size_of(indices, lengths), default=None)
        if largest is None:
            break
        half = len(largest) // 2
        bins.remove(largest)
        bins += [largest[:half], largest[half:]]
    return bins


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInputs:
    """The tensors of one micro-batch, with the tokens to score picked out."""

    input_ids: Tensor  # [B, T], or [1, T] with a layout
    states: Tensor  # [N]
    """Flat index (row * T + position) of the hidden state that predicts each scored token: that of the token before it."""
    chosen: Tensor  # [N]
    """The scored token ids."""
    layout: RowLayout | None = None
    """Where the rows lie in a flat sequence; None where they are padded."""


def model_inputs(
    rows: Sequence[tuple[Tensor, Tensor]], *, arrangement: Arrangement = Arrangement.PADDED, device: torch.device | str = "cpu"
) -> ModelInputs:
    """Tensors of rows of (ids [L], mask [L]); the tokens with mask != 0 are scored, row by row in order.

    No rows give one dummy row without anything to score. The first token of a row has no state before it and must have mask 0.
    """
    if not rows:
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        return ModelInputs(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), states=empty, chosen=empty)
    assert not any(bool(mask[0]) for _, mask in rows), "the first token of a row cannot be trained on: nothing predicts it"
    if arrangement is Arrangement.PADDED:
        return _pad(rows, device)
    flat = lay_out_rows([ids for ids, _ in rows], shares=arrangement is Arrangement.SHARED, device=torch.device(device))
    scored = [mask.nonzero().squeeze(1) for _, mask in rows]
    states = torch.cat([places[positions - 1] for places, positions in zip(flat.places, scored, strict=True)])
    chosen = torch.cat([ids[positions] for (ids, _), positions in zip(rows, scored, strict=True)])
    return ModelInputs(input_ids=flat.ids.to(device)[None], states=states.to(device), chosen=chosen.to(device), layout=flat.layout)


def _pad(rows: Sequence[tuple[Tensor, Tensor]], device: torch.device | str) -> ModelInputs:
    width = max(len(ids) for ids, _ in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for index, (ids, row_mask) in enumerate(rows):
        input_ids[index, : len(ids)] = ids
        mask[index, : len(ids)] = row_mask != 0
    positions = mask.view(-1).nonzero().squeeze(1)
    return ModelInputs(input_ids=input_ids.to(device), states=(positions - 1).to(device), chosen=input_ids.view(-1)[positions].to(device))
