"""Attention over rows that lie behind one another in one flat sequence, with beginnings that rows share computed once.

Registered with transformers under `NAME`, so that its models run unchanged: everything but attention treats tokens one by one, and a
flat [1, T] batch has no padding. The layout goes through the model as a keyword. A segment sees its prefix (another segment) and
itself up to each token, and nothing else: no row can see another. Without a layout (a padded [B, T] batch) it is plain causal attention.

On CUDA in half precision it is one call of torch's variable-length flash kernel. Elsewhere short segments with one prefix make a block,
and blocks of similar prefix and length go through `scaled_dot_product_attention` together; only there, and only in attention, is anything
padded.

Legend: T tokens, A heads, K heads of keys, D head width, S blocks of a bucket, L their longest, P their longest prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from psrl.errors import TrainingError

NAME = "psrl_rows"
MIN_FILL = 0.8
"""A segment shorter than this share of the longest of its bucket opens a new one."""
MIN_PREFIX_FILL = 0.5
"""The same of prefixes: their padding is keys alone, no queries."""
MIN_BUCKET_TOKENS = 64
"""Smaller buckets are not closed for the sake of padding: the fixed cost of a call would exceed it."""
PAIRS_PER_KEY = 16
"""So many pairs of a query and a key that it does not see cost as much as one more key of a prefix."""
FLASH_DTYPES = (torch.float16, torch.bfloat16)
UNKNOWN_ARGUMENTS = ("softcap", "s_aux", "position_bias", "sliding_window")
"""What some models ask of their attention and this one does not do."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `start` to `start + length` of the flat sequence, which continue those of another segment, if they have a prefix."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0


@dataclass(frozen=True)
class RowLayout:
    """Where rows and what they share lie in a flat sequence [T]."""

    segments: tuple[Segment, ...]
    """In the order of the flat sequence, without gaps."""
    device: torch.device

    @cached_property
    def position_ids(self) -> Tensor:
        """[1, T]: where each token stands in its row."""
        parts = [torch.arange(s.prefix_length, s.prefix_length + s.length) for s in self.segments]
        return torch.cat(parts).to(self.device)[None]

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The blocks by similar prefix, those with one apart from those without, and then by similar length."""
        buckets: list[Bucket] = []
        blocks = _blocks(self.segments)
        for has_prefix in (False, True):
            mine = [block for block in blocks if (block.prefix_length > 0) == has_prefix]
            for part in _similar(mine, lambda block: block.prefix_length, min_fill=MIN_PREFIX_FILL):
                buckets += [Bucket.of(alike) for alike in _similar(part, lambda block: block.length, min_fill=MIN_FILL)]
        return tuple(buckets)

    @cached_property
    def gathered(self) -> GatheredTokens:
        """The tokens of all buckets, on the device."""
        return GatheredTokens.of(self.buckets, self.device)

    @cached_property
    def spans(self) -> VariableSpans:
        """For a kernel of variable length."""
        return VariableSpans.of(self.segments, self.device)


@dataclass(frozen=True, slots=True)
class Block:
    """Segments with the same prefix that are attended to together, so that the keys of the prefix are there once for all of them."""

    segments: tuple[Segment, ...]

    @property
    def length(self) -> int:
        """Tokens of its segments."""
        return sum(segment.length for segment in self.segments)

    @property
    def prefix_length(self) -> int:
        """Of each of them."""
        return self.segments[0].prefix_length


@dataclass(frozen=True)
class Bucket:
    """Blocks that go through one call, padded at their right."""

    queries: np.ndarray  # [S, L]
    """Flat index of each query; padding repeats the block's first."""
    keys: np.ndarray  # [S, P + L]
    """Flat index of each key: prefix, padding, own tokens, padding."""
    is_real: np.ndarray  # [S, L]
    """False of padding."""
    mask: np.ndarray | None  # [S, 1, L, P + L] bool
    """None where each block is one segment without a prefix: plain causal attention, in which only padding sees padding."""

    @staticmethod
    def of(blocks: Sequence[Block]) -> Bucket:
        """Index and mask of at least one block."""
        shape = len(blocks), max(block.length for block in blocks)
        queries_SL, segment_SL = np.empty(shape, np.int64), np.full(shape, -1)
        prefix_SP = np.empty((len(blocks), max(block.prefix_length for block in blocks)), np.int64)
        for index, block in enumerate(blocks):
            first = block.segments[0]
            queries_SL[index], prefix_SP[index] = first.start, first.start
            prefix_SP[index, : first.prefix_length] = np.arange(first.prefix_start, first.prefix_start + first.prefix_length)
            end = 0
            for number, segment in enumerate(block.segments):
                queries_SL[index, end : end + segment.length] = np.arange(segment.start, segment.start + segment.length)
                segment_SL[index, end : end + segment.length] = number
                end += segment.length
        keys_SK = np.concatenate((prefix_SP, queries_SL), 1)
        if keys_SK.shape == shape and all(len(block.segments) == 1 for block in blocks):
            return Bucket(queries_SL, keys_SK, segment_SL >= 0, None)
        mask_SLK = np.empty((*shape, keys_SK.shape[1]), bool)
        prefix_lengths_S = np.array([block.prefix_length for block in blocks])
        width = prefix_SP.shape[1]
        mask_SLK[:, :, :width] = (np.arange(width) < prefix_lengths_S[:, None])[:, None, :]
        mask_SLK[:, :, width:] = np.tri(shape[1], dtype=bool) & (segment_SL[:, :, None] == segment_SL[:, None, :])
        return Bucket(queries_SL, keys_SK, segment_SL >= 0, mask_SLK[:, None])


@dataclass(frozen=True)
class GatheredTokens:
    """What goes through the buckets, one bucket behind the other."""

    queries: Tensor  # [all S * L]
    keys: Tensor  # [all S * (P + L)]
    shapes: list[tuple[int, int, int]]
    """(S, L, P + L) of each bucket."""
    masks: list[Tensor | None]
    places: Tensor  # [T]
    """Where each token of the flat sequence is among the queries."""

    @staticmethod
    def of(buckets: Sequence[Bucket], device: torch.device) -> GatheredTokens:
        """Of buckets that have every token of a flat sequence as a query once."""
        queries = np.concatenate([bucket.queries.ravel() for bucket in buckets])
        is_real = np.concatenate([bucket.is_real.ravel() for bucket in buckets])
        places = np.empty(int(is_real.sum()), np.int64)
        places[queries[is_real]] = is_real.nonzero()[0]
        return GatheredTokens(
            queries=torch.from_numpy(queries).to(device),
            keys=torch.from_numpy(np.concatenate([bucket.keys.ravel() for bucket in buckets])).to(device),
            shapes=[(*bucket.queries.shape, bucket.keys.shape[1]) for bucket in buckets],
            masks=[None if bucket.mask is None else torch.from_numpy(bucket.mask).to(device) for bucket in buckets],
            places=torch.from_numpy(places).to(device),
        )


@dataclass(frozen=True)
class VariableSpans:
    """Segments as a kernel of variable length wants them."""

    cu_queries: Tensor  # [segments + 1] int32
    cu_keys: Tensor  # [segments + 1] int32
    keys: Tensor | None  # [all keys]
    """Flat index of each key, each segment's prefix before its own tokens; None where keys are the flat sequence itself."""
    max_queries: int
    max_keys: int

    @staticmethod
    def of(segments: Sequence[Segment], device: torch.device) -> VariableSpans:
        """Of segments in the order of the flat sequence."""
        lengths = torch.tensor([0, *(s.length for s in segments)])
        key_lengths = torch.tensor([0, *(s.prefix_length + s.length for s in segments)])
        keys = None
        if any(s.prefix_length for s in segments):
            parts = [
                part
                for s in segments
                for part in (torch.arange(s.prefix_start, s.prefix_start + s.prefix_length), torch.arange(s.start, s.start + s.length))
            ]
            keys = torch.cat(parts).to(device)
        return VariableSpans(
            cu_queries=lengths.cumsum(0).to(device, torch.int32),
            cu_keys=key_lengths.cumsum(0).to(device, torch.int32),
            keys=keys,
            max_queries=int(lengths.max()),
            max_keys=int(key_lengths.max()),
        )


def rows_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    row_layout: RowLayout | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [B, A, T, D], key and value [B, K, T, D]; gives ([B, T, A, D], None).

    Raises:
        TrainingError: The model asks for something that this attention does not do.
    """
    if row_layout is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    asked = [name for name in UNKNOWN_ARGUMENTS if others.pop(name, None) is not None]
    if asked:
        fix = "set train_actor_rollout_ref.actor.use_remove_padding=false"
        raise TrainingError(f"{type(module).__name__} asks for {', '.join(asked)}, which packed rows do not have: {fix}")
    query_TAD, key_TKD, value_TKD = (states[0].transpose(0, 1) for states in (query, key, value))
    if query.is_cuda and query.dtype in FLASH_DTYPES:
        attended_TAD = _by_flash(query_TAD, key_TKD, value_TKD, row_layout.spans, scaling)
    else:
        attended_TAD = _by_buckets(query_TAD, key_TKD, value_TKD, row_layout, scaling)
    return attended_TAD[None], None


AttentionInterface.register(NAME, rows_attention)


def hidden_states(decoder: nn.Module, input_ids: Tensor, layout: RowLayout | None) -> Tensor:
    """[all tokens, H]: the last hidden states of a padded [B, T] batch or, with a layout, of a flat [1, T] one."""
    if layout is None:
        padded: Tensor = decoder(input_ids=input_ids, use_cache=False)[0]
        return padded.flatten(0, 1)
    flat: Tensor = decoder(input_ids=input_ids, position_ids=layout.position_ids, row_layout=layout, use_cache=False)[0]
    return flat[0]


def use_rows_attention(causal_lm: Any) -> bool:
    """Have a transformers model attend by `rows_attention`; False, and nothing changed, where its layers are not plain attention."""
    config = causal_lm.config.get_text_config()
    kinds = set(config.to_dict().get("layer_types") or ("full_attention",))
    if not causal_lm._supports_attention_backend or kinds != {"full_attention"}:
        return False
    causal_lm.set_attn_implementation(NAME)
    return True


def _blocks(segments: Sequence[Segment]) -> list[Block]:
    """Segments with the same prefix, shortest first, together as long as that costs less than the prefix's keys once more."""
    blocks: list[Block] = []
    for segment in sorted(segments, key=lambda s: (s.prefix_start, s.prefix_length, s.length)):
        if blocks and _may_join(blocks[-1], segment):
            blocks[-1] = Block((*blocks[-1].segments, segment))
        else:
            blocks.append(Block((segment,)))
    return blocks


def _may_join(block: Block, segment: Segment) -> bool:
    first = block.segments[0]
    if (first.prefix_start, first.prefix_length) != (segment.prefix_start, segment.prefix_length):
        return False
    return 2 * block.length * segment.length <= PAIRS_PER_KEY * segment.prefix_length


def _similar(blocks: Sequence[Block], size_of: Callable[[Block], int], *, min_fill: float) -> list[list[Block]]:
    """Largest first; a bucket is closed when the next block would be mostly padding."""
    buckets: list[list[Block]] = []
    for block in sorted(blocks, key=size_of, reverse=True):
        largest = size_of(buckets[-1][0]) if buckets else 0
        if not buckets or (size_of(block) < min_fill * largest and len(buckets[-1]) * largest >= MIN_BUCKET_TOKENS):
            buckets.append([])
        buckets[-1].append(block)
    return buckets


def _by_flash(query_TAD: Tensor, key_TKD: Tensor, value_TKD: Tensor, spans: VariableSpans, scaling: float | None) -> Tensor:
    if spans.keys is not None:
        key_TKD, value_TKD = key_TKD.index_select(0, spans.keys), value_TKD.index_select(0, spans.keys)
    # Causal in the sense of the last query seeing the last key: a segment sees all of its prefix.
    attended: Tensor = varlen_attn(
        query_TAD,
        key_TKD,
        value_TKD,
        spans.cu_queries,
        spans.cu_keys,
        spans.max_queries,
        spans.max_keys,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=query_TAD.shape[1] != key_TKD.shape[1],
    )
    return attended


def _by_buckets(query_TAD: Tensor, key_TKD: Tensor, value_TKD: Tensor, layout: RowLayout, scaling: float | None) -> Tensor:
    tokens = layout.gathered
    queries = query_TAD.index_select(0, tokens.queries).split([num * length for num, length, _ in tokens.shapes])
    keys, values = (
        states.index_select(0, tokens.keys).split([num * width for num, _, width in tokens.shapes]) for states in (key_TKD, value_TKD)
    )
    parts = []
    for index, (num_blocks, _, _) in enumerate(tokens.shapes):
        query, key, value = (part[index].unflatten(0, (num_blocks, -1)).transpose(1, 2) for part in (queries, keys, values))
        mask = tokens.masks[index]
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        parts.append(attended.transpose(1, 2).flatten(0, 1))
    return torch.cat(parts).index_select(0, tokens.places)
