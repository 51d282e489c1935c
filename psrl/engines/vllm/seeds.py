"""Seeds for an engine whose random numbers begin anew with every request."""

from __future__ import annotations

MASK = 2**64 - 1
SEED_BITS = 63
"""vLLM takes seeds of a signed 64-bit integer."""


def vllm_seed(seed: int, prompt_length: int) -> int:
    """The turn's seed with the length of its prompt mixed in (splitmix64).

    The rest of a turn that was given back is asked for with the same seed and a longer prompt. Without the length it would be drawn with
    the numbers that drew its beginning.
    """
    x = (seed * 0x9E3779B97F4A7C15 + prompt_length + 1) & MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = ((x ^ (x >> shift)) * factor) & MASK
    return (x ^ (x >> 31)) >> (64 - SEED_BITS)
