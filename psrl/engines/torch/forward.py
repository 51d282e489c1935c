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
        mask = None
        if batch.num_decode:
            decode_len = int(batch.positions_T[: batch.num_decode].max()) + 1
            mask = torch.zeros((batch.num_decode, 1, 1, decode_len), dtype=self._cache.dtype, device=self._device)
            mask.masked_fill_((self._range[:decode_len] > positions[: batch.num_decode, None])[:, None, None], float("-inf"))
        padded = self._padded(batch.spans) if is_worth_padding(batch.spans) else None
        span_masks = [
            None if span.start == 0 or padded else self._range[: span.end] <= self._range[span.start : span.end, None]
            for span in batch.spans
        ]
        x = F.embedding(tokens, self._weights.embedding)
        size = (shape.hidden_size,)
        for layer, (keys, values) in zip(self._weights.layers, self._cache, strict=True):
            normed = F.rms_norm(x, size, layer.input_norm, shape.rms_norm_eps)
            q, k, v = self._project(layer, normed, cos, sin)
            keys[slots, :, positions] = k
            values[slots, :, positions] = v
            attended = self._attend(q, keys, values, batch, mask, span_masks, padded)
            x = x + F.linear(attended, layer.output, layer.output_bias)
            normed = F.rms_norm(x, size, layer.mlp_norm, shape.rms_norm_eps)
            gate, up = F.linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            x = x + F.linear(F.silu(gate, inplace=True).mul_(up), layer.down, layer.down_bias)
        if len(batch.rows_R) != len(batch.token_ids_T):
            x = x[rows]
        return F.linear(F.rms_norm(x, size, self._weights.final_norm, shape.rms_norm_eps), self._weights.head).float()

    def _project(
        self, layer: Layer, normed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, H, D], k and v [T, K, D], rotated."""
        shape = self._weights.shape
        num_heads, num_kv, size = shape.num_heads, shape.num_kv_heads, shape.head_dim
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(-1, num_heads + 2 * num_kv, size)
        qk, v = qkv[:, : num_heads + num_kv], qkv[:, num_heads + num_kv :]
        if layer.q_norm is not None and layer.k_norm is not None:
            q_normed = F.rms_norm(qk[:, :num_heads], (size,), layer.q_norm, shape.rms_norm_eps)
            k_normed = F.rms_norm(qk[:, num_heads:], (size,), layer.k_norm, shape.rms_norm_eps)
            qk = torch.cat((q_normed, k_normed), 1)
        rotated = torch.addcmul(qk * cos, qk.roll(size // 2, -1), sin)
        return rotated[:, :num_heads], rotated[:, num_heads:], v

    def _attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        batch: Batch,
        mask: torch.Tensor | None,
        span_masks: list[torch.Tensor | None],
        padded: PaddedSpans | None,
    ) -> torch.Tensor:
        """[T, H * D]."""
        shape = self._weights.shape
        num_decode = batch.num_decode
        parts = []
        if mask is not None:
            # The queries that share a kv head are the query axis: one pass over each key, whatever the number of heads.
            grouped = q[:num_decode].reshape(num_decode, shape.num_kv_heads, -1, shape.head_dim)
            attended = attend_in_place(grouped, keys[:num_decode], values[:num_decode], mask)
            parts.append(attended.reshape(num_decode, -1))
        if padded is not None:
            parts.append(self._attend_padded(q[num_decode:], keys, values, padded))
            return torch.cat(parts)
        row = num_decode
        for span, span_mask in zip(batch.spans, span_masks, strict=True):
            length = span.end - span.start
            attended = F.scaled_dot_product_attention(
                q[row : row + length].transpose(0, 1).unsqueeze(0),
                keys[span.slot, :, : span.end].unsqueeze(0),
                values[span.slot, :, : span.end].unsqueeze(0),
                attn_mask=span_mask,
                is_causal=span_mask is None,
                enable_gqa=shape.num_heads != shape.num_kv_heads,
            )
            parts.append(attended[0].transpose(0, 1).reshape(length, -1))
            row += length
        return parts[0] if len(parts) == 1 else torch.cat(parts)

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


def attend_in_place(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[N, K, G, D]: softmax(q k / sqrt(D) + mask) v, over the first positions of the cache.

    Two batched products read the cache where it lies; on a CPU that was seen to take 0.75 of the fused kernel's time at one
    thread and 0.9 at two.

    Args:
        q: [N, K, G, D], G query heads per kv head.
        keys: [N, K, M, D], a slice of the cache's slots.
        values: As keys.
        mask: [N, 1, 1, L], 0 or -inf, L <= M.
    """
    if q.device.type != "cpu":
        length = mask.shape[-1]
        return F.scaled_dot_product_attention(q, keys[:, :, :length], values[:, :, :length], attn_mask=mask)
    num_rows, num_kv, group, size = q.shape
    length = mask.shape[-1]
    keys = keys.view(num_rows * num_kv, -1, size)[:, :length]
    values = values.view(num_rows * num_kv, -1, size)[:, :length]
    scores = torch.bmm((q * size**-0.5).reshape(-1, group, size), keys.transpose(1, 2)).view(num_rows, num_kv, group, length).add_(mask)
    return torch.bmm(scores.softmax(-1).view(-1, group, length), values).view(num_rows, num_kv, group, size)
