"""Attention over rows that lie behind one another in one flat sequence, with beginnings that rows share computed once.

Registered with transformers under `NAME`, so that its models run unchanged: everything but attention treats tokens one by one, and a
flat [1, T] batch has no padding. The layout goes through the model as a keyword. A segment sees its prefix (another segment) and
itself up to each token, and nothing else: no row can see another. Without a layout (a padded [B, T] batch) it is plain causal attention.

On CUDA in half precision it is one call of torch's variable-length flash kernel. Elsewhere segments of similar prefix and length go
through `scaled_dot_product_attention` together; only there, and only in attention, is anything padded.

Legend: T tokens, A heads, K heads of keys, D head width, S segments of a bucket, L their longest, P their longest prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
MIN_BUCKET_TOKENS = 1024
"""Smaller buckets are not closed for the sake of padding: the fixed cost of a call would exceed it."""
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
        """The segments by similar prefix, those with one apart from those without, and then by similar length."""
        buckets: list[Bucket] = []
        for has_prefix in (False, True):
            mine = [s for s in self.segments if (s.prefix_length > 0) == has_prefix]
            for part in _similar(mine, lambda s: s.prefix_length, min_fill=MIN_PREFIX_FILL):
                buckets += [Bucket.of(segments, self.device) for segments in _similar(part, lambda s: s.length, min_fill=MIN_FILL)]
        return tuple(buckets)

    @cached_property
    def order(self) -> Tensor:
        """[T]: where each token of the flat sequence lies in what the buckets give, one behind the other."""
        tokens = torch.cat([bucket.tokens for bucket in self.buckets])
        return torch.empty_like(tokens).scatter_(0, tokens, torch.arange(len(tokens), device=self.device))

    @cached_property
    def spans(self) -> VariableSpans:
        """For a kernel of variable length."""
        return VariableSpans.of(self.segments, self.device)


@dataclass(frozen=True)
class Bucket:
    """Segments that go through one call, padded at their right."""

    queries: Tensor  # [S * L]
    """Flat index of each query; padding repeats the segment's first."""
    keys: Tensor  # [S * (P + L)]
    """Flat index of each key: prefix, padding, own tokens, padding."""
    mask: Tensor | None  # [S, 1, L, P + L] bool
    """None where no segment has a prefix: plain causal attention, in which padding at the right is seen by padding only."""
    tokens: Tensor  # [real tokens]
    """Flat index of each token, segment by segment."""
    kept: Tensor  # [real tokens]
    """Where each of them lies in [S * L]."""
    num_segments: int

    @staticmethod
    def of(segments: Sequence[Segment], device: torch.device) -> Bucket:
        """Index and mask of at least one segment."""
        starts = torch.tensor([s.start for s in segments])[:, None]
        lengths = torch.tensor([s.length for s in segments])[:, None]
        prefix_starts = torch.tensor([s.prefix_start for s in segments])[:, None]
        prefix_lengths = torch.tensor([s.prefix_length for s in segments])[:, None]
        own, before = torch.arange(int(lengths.max()))[None], torch.arange(int(prefix_lengths.max()))[None]
        queries_SL = torch.where(own < lengths, starts + own, starts)
        prefix_SP = torch.where(before < prefix_lengths, prefix_starts + before, starts)
        is_real_SL = own < lengths
        mask = None
        if before.numel():
            sees_prefix = (before < prefix_lengths)[:, None, None, :].expand(-1, 1, own.numel(), -1)
            sees_own = (own[0][None, :] <= own[0][:, None])[None, None].expand(len(segments), 1, -1, -1)
            mask = torch.cat((sees_prefix, sees_own), -1).to(device)
        return Bucket(
            queries=queries_SL.flatten().to(device),
            keys=torch.cat((prefix_SP, queries_SL), 1).flatten().to(device),
            mask=mask,
            tokens=queries_SL[is_real_SL].to(device),
            kept=is_real_SL.flatten().nonzero().squeeze(1).to(device),
            num_segments=len(segments),
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


def _similar(segments: Sequence[Segment], size_of: Callable[[Segment], int], *, min_fill: float) -> list[list[Segment]]:
    """Largest first; a bucket is closed when the next segment would be mostly padding."""
    buckets: list[list[Segment]] = []
    for segment in sorted(segments, key=size_of, reverse=True):
        largest = size_of(buckets[-1][0]) if buckets else 0
        if not buckets or (size_of(segment) < min_fill * largest and len(buckets[-1]) * largest >= MIN_BUCKET_TOKENS):
            buckets.append([])
        buckets[-1].append(segment)
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
    parts = []
    for bucket in layout.buckets:
        query, key, value = (
            states.index_select(0, index).unflatten(0, (bucket.num_segments, -1)).transpose(1, 2)
            for states, index in ((query_TAD, bucket.queries), (key_TKD, bucket.keys), (value_TKD, bucket.keys))
        )
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=bucket.mask,
            is_causal=bucket.mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        parts.append(attended.transpose(1, 2).flatten(0, 1).index_select(0, bucket.kept))
    return torch.cat(parts).index_select(0, layout.order)
