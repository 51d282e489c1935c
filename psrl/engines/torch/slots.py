"""Slots: rows of the KV cache with the tokens whose keys they hold.

Invariant: slots 0..num_running-1 belong to running sequences, the others hold ended turns (or nothing) and are the prefix cache; one of
them, the spare one, is always empty, so that a slot is moved by one copy.
The keys of a slot's first `num_computed` tokens are valid for the current weights; `num_tokens` are known (prompt and sampled).
Decoding reads slots 0..n-1 in place, so sequences that end are swapped out of the way.

Shapes: S slots, M longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from psrl.engines.torch.architecture import Architecture

ROW_PADDING = 16
"""Positions added to each row so that rows do not lie a power of two apart, where they would share cache sets."""
MIN_SHARED_TOKENS = 16
"""A prefix that another sequence is about to compute is waited for when it saves at least this many tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixMatch:
    """The slot that holds the longest beginning of a prompt."""

    slot: int
    num_tokens: int
    num_coming: int
    """The longest beginning that running sequences will hold after their prefill."""


NEVER = np.iinfo(np.int64).max
SAMPLING = np.dtype(
    [("temperature", np.float32), ("top_p", np.float32), ("top_k", np.int64), ("seed", np.uint64), ("max_tokens", np.int64)]
)
"""How a running sequence is sampled; `max_tokens` with its prompt."""


class SlotTable:
    """Host-side arrays by slot, beside the cache of keys and values."""

    def __init__(self, keys_values: torch.Tensor, *, max_len: int) -> None:
        """`keys_values`: [layers, 2, S, kv_heads, >= M, head_dim], S as `num_slots_of` has it."""
        self.keys_values = keys_values
        num_slots = keys_values.shape[2]
        self.num_running = 0
        self.tokens = np.zeros((num_slots, max_len), np.int64)
        self._counts = np.zeros((3, num_slots), np.int64)
        self.num_tokens, self.num_computed, self.last_used = self._counts
        # Of running slots only.
        self.logprobs = np.zeros((num_slots, max_len), np.float32)
        self.versions = np.zeros((num_slots, max_len), np.int32)
        self.sampling = np.zeros(num_slots, SAMPLING)
        self._spare = num_slots - 1
        self._clock = 0

    def match(self, prompt: np.ndarray) -> PrefixMatch:
        """Compare a prompt with every slot; its last token always stays to be computed."""
        length = len(prompt) - 1
        # One column more than is compared, which always differs: argmax is then the number of tokens that agree.
        differs = np.ones((len(self.tokens), length + 1), bool)
        np.not_equal(self.tokens[:, :length], prompt[:length], out=differs[:, :length])
        agree = differs.argmax(1)
        ready = np.minimum(agree, self.num_computed)
        coming = np.minimum(agree, self.num_tokens)[: self.num_running]
        num_tokens = int(ready.max())
        # Of equal matches take one that ends there: an ended turn that this prompt goes on with.
        slot = int(np.where(ready == num_tokens, self.num_computed, NEVER).argmin())
        return PrefixMatch(slot=slot, num_tokens=num_tokens, num_coming=int(coming.max()) if len(coming) else 0)

    def admit(self, prompt: np.ndarray, match: PrefixMatch) -> int:
        """Make the next running slot hold the prompt, with what `match` found; returns the slot."""
        slot, source = self.num_running, match.slot
        if source >= slot and match.num_tokens == self.num_computed[source] > 0:
            if source != slot:
                if slot != self._spare:
                    self._move(slot, self._spare)
                self._move(source, slot)
                self._spare = source
        else:
            victim = self._oldest_idle(source)
            self._counts[:, victim] = 0
            if victim != slot:
                if slot != self._spare:
                    self._move(slot, self._spare)
                    source = self._spare if source == slot else source
                self._spare = victim
            if source != slot and match.num_tokens:
                shared = self.keys_values[:, :, :, :, : match.num_tokens]
                shared[:, :, slot].copy_(shared[:, :, source])
        self.tokens[slot, : len(prompt)] = prompt
        self.num_tokens[slot] = len(prompt)
        self.num_computed[slot] = match.num_tokens
        self.num_running += 1
        return slot

    def release(self, slot: int) -> None:
        """Turn a running slot into cache; the last running slot takes its place."""
        self._clock += 1
        self.num_tokens[slot] = self.num_computed[slot] = min(self.num_computed[slot], self.num_tokens[slot])
        self.last_used[slot] = self._clock
        last = self.num_running - 1
        if slot != last:
            self._move(slot, self._spare)
            self._move_running(last, slot)
            self._spare = last
        self.num_running = last

    def swap(self, a: int, b: int) -> None:
        """Exchange two running slots."""
        for source, target in ((a, self._spare), (b, a), (self._spare, b)):
            self._move_running(source, target)

    def _oldest_idle(self, source: int) -> int:
        """The ended turn, or empty slot but the spare one, whose place is taken first; `source` only where there is no other."""
        age = np.where(self.num_computed == 0, -1, self.last_used)
        age[source] = NEVER - 1
        age[self._spare] = age[: self.num_running] = NEVER
        return int(age.argmin())

    def _move(self, source: int, target: int) -> None:
        """Tokens, keys and values into an empty slot; `source` is empty then."""
        used, computed = int(self.num_tokens[source]), int(self.num_computed[source])
        self.tokens[target, :used] = self.tokens[source, :used]
        held = self.keys_values[:, :, :, :, :computed]
        held[:, :, target].copy_(held[:, :, source])
        self._counts[:, target] = self._counts[:, source]
        self._counts[:, source] = 0

    def _move_running(self, source: int, target: int) -> None:
        used = int(self.num_tokens[source])
        for array in (self.logprobs, self.versions):
            array[target, :used] = array[source, :used]
        self.sampling[target] = self.sampling[source]
        self._move(source, target)

    def clear_idle(self) -> None:
        """Forget ended turns."""
        self.num_tokens[self.num_running :] = 0
        self.num_computed[self.num_running :] = 0

    def clear_all(self) -> None:
        """Forget all keys; running sequences keep their tokens and are computed again."""
        self.clear_idle()
        self.num_computed[:] = 0

    @property
    def filled(self) -> float:
        """Share of the cache's positions that hold keys, of running sequences or ended turns; the spare slot does not count."""
        return float(self.num_computed.sum()) / self.tokens[1:].size

    def usage(self, max_running: int) -> float:
        """Keys of running sequences as a share of what `max_running` of full length would have."""
        return float(self.num_computed[: self.num_running].sum()) / (max_running * self.tokens.shape[1])


def num_slots_of(max_num_seqs: int, num_cache_slots: int) -> int:
    """Of a cache for so many running sequences and so many ended turns."""
    return max_num_seqs + num_cache_slots + 1


def cache_bytes(shape: Architecture, *, num_slots: int, max_len: int, dtype: torch.dtype) -> int:
    """Memory of the keys and values."""
    return shape.num_layers * 2 * num_slots * shape.num_kv_heads * (max_len + ROW_PADDING) * shape.head_dim * dtype.itemsize


def allocate_cache(shape: Architecture, *, num_slots: int, max_len: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros (masked positions are multiplied by 0, so they must be finite); on CPU pages are taken when first written."""
    size = (shape.num_layers, 2, num_slots, shape.num_kv_heads, max_len + ROW_PADDING, shape.head_dim)
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    flat = np.zeros(cache_bytes(shape, num_slots=num_slots, max_len=max_len, dtype=dtype), np.uint8)
    return torch.from_numpy(flat).view(dtype).view(size)
