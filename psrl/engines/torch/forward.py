"""One forward pass over a mixed batch: sequences that decode one token, and spans of prompts.

Invariant: rows 0..num_decode-1 of the flat batch are one token each of the sequences in slots 0..num_decode-1; spans follow. Keys
and values are written before they are read, so a span sees itself.

Shapes: T flat tokens, H heads, K kv heads, D head size, S slots, M longest sequence, R rows that need logits, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from psrl.engines.torch.architecture import rope_tables
from psrl.engines.torch.weights import Layer, Weights
from psrl.kernels.products import linear

MIN_PADDED_SPANS = 3
MAX_PADDING = 4
"""Most padded over exact work in attention, which is a small part of a prompt's cost."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Tokens `start` to `end` of the sequence in `slot`."""

    slot: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one step computes."""

    token_ids_T: np.ndarray
    positions_T: np.ndarray
    slots_T: np.ndarray
    num_decode: int
    spans: list[Span]
    rows_R: np.ndarray
    """Flat indices whose logits are wanted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PaddedSpans:
    """Several spans as one padded attention: N spans, L longest span, E furthest end."""

    slots_N: torch.Tensor
    rows: torch.Tensor
    """Where each span token lies in the flattened [N * L] queries."""
    num_spans: int
    longest: int
    furthest: int
    mask: torch.Tensor
    """[N, 1, L, E] bool: a token sees what is not after it in its sequence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Which positions each token attends to."""

    decode: torch.Tensor | None
    """[num_decode, 1, 1, longest]: 0, or -inf behind a sequence's last token; None where none decodes."""
    spans: list[torch.Tensor | None]
    """[span, end] bool for each span, None where all of its past is in it; empty where they are padded."""
    padded: PaddedSpans | None


class Forward:
    """The model over a slotted cache of keys and values."""

    def __init__(self, weights: Weights, keys_values: torch.Tensor, *, max_len: int) -> None:
        """`keys_values`: [layers, 2, S, K, >= max_len, D], finite everywhere."""
        shape = weights.shape
        self._weights = weights
        self._cache = keys_values
        device, dtype = keys_values.device, keys_values.dtype
        cos, sin = rope_tables(shape, max_len=max_len)
        self._cos, self._sin = cos.to(device, dtype), sin.to(device, dtype)
        self._device = device
        self._range = torch.arange(max_len, device=device)

    def use(self, weights: Weights) -> None:
        """Other weights of the same architecture, dtype and device from the next pass on; keys of older ones must be forgotten."""
        self._weights = weights

    def logits(self, batch: Batch) -> torch.Tensor:
        """[R, V] float32."""
        shape = self._weights.shape
        tokens, positions, slots, rows = (
            torch.from_numpy(array).to(self._device) for array in (batch.token_ids_T, batch.positions_T, batch.slots_T, batch.rows_R)
        )
        cos, sin = self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)
        seen = self._what_is_seen(batch, positions)
        x = F.embedding(tokens, self._weights.embedding)
        attended = x.new_empty(len(x), shape.num_heads * shape.head_dim)
        size = (shape.hidden_size,)
        for layer, cache in zip(self._weights.layers, self._cache, strict=True):
            q, kv = self._project(layer, F.rms_norm(x, size, layer.input_norm, shape.rms_norm_eps), cos, sin)
            cache.permute(1, 3, 0, 2, 4)[slots, positions] = kv  # seen as [S, M, 2, K, D]
            self._attend(q, cache, batch, seen, attended)
            x = x + linear(attended, layer.output, layer.output_bias)
            normed = F.rms_norm(x, size, layer.mlp_norm, shape.rms_norm_eps)
            gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            x = x + linear(F.silu(gate, inplace=True).mul_(up), layer.down, layer.down_bias)
        if len(batch.rows_R) != len(batch.token_ids_T):
            x = x[rows]
        return linear(F.rms_norm(x, size, self._weights.final_norm, shape.rms_norm_eps), self._weights.head).float()

    def _what_is_seen(self, batch: Batch, positions: torch.Tensor) -> Seen:
        decode = None
        if batch.num_decode:
            decode_len = int(batch.positions_T[: batch.num_decode].max()) + 1
            decode = torch.zeros((batch.num_decode, 1, 1, decode_len), dtype=self._cache.dtype, device=self._device)
            decode.masked_fill_((self._range[:decode_len] > positions[: batch.num_decode, None])[:, None, None], float("-inf"))
        if is_worth_padding(batch.spans):
            return Seen(decode=decode, spans=[], padded=self._padded(batch.spans))
        spans = [None if span.start == 0 else self._range[: span.end] <= self._range[span.start : span.end, None] for span in batch.spans]
        return Seen(decode=decode, spans=spans, padded=None)

    def _project(self, layer: Layer, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [T, H, D], and keys with values [T, 2, K, D]; q and keys rotated."""
        shape = self._weights.shape
        num_heads, num_kv, size = shape.num_heads, shape.num_kv_heads, shape.head_dim
        qkv = linear(normed, layer.qkv, layer.qkv_bias).view(-1, num_heads + 2 * num_kv, size)
        qk = qkv[:, : num_heads + num_kv]
        normed_qk = qk if layer.qk_norm is None else F.rms_norm(qk, (size,), None, shape.rms_norm_eps).mul_(layer.qk_norm)
        torch.addcmul(normed_qk * cos, normed_qk.roll(size // 2, -1), sin, out=qk)
        return qkv[:, :num_heads], qkv[:, num_heads:].unflatten(1, (2, num_kv))

    def _attend(self, q: torch.Tensor, cache: torch.Tensor, batch: Batch, seen: Seen, attended: torch.Tensor) -> None:
        """Fills `attended` [T, H * D]. `cache`: [2, S, K, M, D]."""
        shape = self._weights.shape
        keys, values = cache
        num_decode = batch.num_decode
        if seen.decode is not None:
            # The queries that share a kv head are the query axis: one pass over each key, whatever the number of heads.
            grouped = q[:num_decode].reshape(num_decode, shape.num_kv_heads, -1, shape.head_dim)
            attend_in_place(grouped, keys[:num_decode], values[:num_decode], seen.decode, attended[:num_decode])
        if seen.padded is not None:
            attended[num_decode:] = self._attend_padded(q[num_decode:], keys, values, seen.padded)
            return
        row = num_decode
        for span, mask in zip(batch.spans, seen.spans, strict=True):
            length = span.end - span.start
            one = F.scaled_dot_product_attention(
                q[row : row + length].transpose(0, 1).unsqueeze(0),
                keys[span.slot, :, : span.end].unsqueeze(0),
                values[span.slot, :, : span.end].unsqueeze(0),
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=shape.num_heads != shape.num_kv_heads,
            )
            attended[row : row + length].view(length, -1, shape.head_dim).copy_(one[0].transpose(0, 1))
            row += length

    def _padded(self, spans: list[Span]) -> PaddedSpans:
        lengths = [span.end - span.start for span in spans]
        longest, furthest = max(lengths), max(span.end for span in spans)
        starts = torch.tensor([span.start for span in spans], device=self._device)
        rows = np.concatenate([np.arange(length) + index * longest for index, length in enumerate(lengths)])
        query_positions = starts[:, None] + self._range[:longest]
        return PaddedSpans(
            slots_N=torch.tensor([span.slot for span in spans], device=self._device),
            rows=torch.from_numpy(rows).to(self._device),
            num_spans=len(spans),
            longest=longest,
            furthest=furthest,
            mask=(self._range[:furthest] <= query_positions[:, :, None])[:, None],
        )

    def _attend_padded(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spans: PaddedSpans) -> torch.Tensor:
        """[span tokens, H * D]; padded queries see only finite keys and are dropped."""
        shape = self._weights.shape
        padded = q.new_zeros(spans.num_spans * spans.longest, *q.shape[1:])
        padded[spans.rows] = q
        attended = F.scaled_dot_product_attention(
            padded.view(spans.num_spans, spans.longest, *q.shape[1:]).transpose(1, 2),
            keys[spans.slots_N, :, : spans.furthest],
            values[spans.slots_N, :, : spans.furthest],
            attn_mask=spans.mask,
            enable_gqa=shape.num_heads != shape.num_kv_heads,
        )
        return attended.transpose(1, 2).reshape(spans.num_spans * spans.longest, -1)[spans.rows]


def is_worth_padding(spans: list[Span]) -> bool:
    """Several short spans cost more kernel launches than padding costs arithmetic; a long one among short ones does not."""
    if len(spans) < MIN_PADDED_SPANS:
        return False
    exact = sum((span.end - span.start) * span.end for span in spans)
    padded = len(spans) * max(span.end - span.start for span in spans) * max(span.end for span in spans)
    return padded <= MAX_PADDING * exact


def attend_in_place(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, out: torch.Tensor) -> None:
    """Writes softmax(q k / sqrt(D) + mask) v over the first positions of the cache into `out`.

    Two batched products read the cache where it lies; on a CPU that was seen to take 0.75 of the fused kernel's time at one
    thread and 0.9 at two.

    Args:
        q: [N, K, G, D], G query heads per kv head.
        keys: [N, K, M, D], a slice of the cache's slots.
        values: As keys.
        mask: [N, 1, 1, L], 0 or -inf, L <= M.
        out: [N, K * G * D], contiguous.
    """
    num_rows, num_kv, group, size = q.shape
    length = mask.shape[-1]
    if q.device.type != "cpu":
        out.view(q.shape).copy_(F.scaled_dot_product_attention(q, keys[:, :, :length], values[:, :, :length], attn_mask=mask))
        return
    keys = keys.view(num_rows * num_kv, -1, size)[:, :length]
    values = values.view(num_rows * num_kv, -1, size)[:, :length]
    scores = torch.bmm((q * size**-0.5).reshape(-1, group, size), keys.transpose(1, 2)).view(num_rows, num_kv, group, length).add_(mask)
    torch.bmm(scores.softmax(-1).view(-1, group, length), values, out=out.view(-1, group, size))
