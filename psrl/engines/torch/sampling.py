"""Sampling for a whole batch at once, with noise that depends on the request only.

Invariant: the random number of a token is a hash of (seed, position in the sequence), so what else runs in the batch, and in which
row, does not change it. A token is drawn by inverting the cumulative distribution. Logits of one request may differ by float noise
(about 1e-6) between batch sizes; a draw changes only where the number falls into such a gap.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch


def uniforms(seeds_R: np.ndarray, positions_R: np.ndarray) -> np.ndarray:
    """[R] float32 inside (0, 1): splitmix64 of seed and position (Steele, Lea, Flood 2014), its top 23 bits."""
    with np.errstate(over="ignore"):
        x = _mix(seeds_R.astype(np.uint64)) + (positions_R.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = _mix(x)
    return ((x >> np.uint64(41)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def sample(
    logits_RV: torch.Tensor, *, temperature_R: np.ndarray, top_p_R: np.ndarray, top_k_R: np.ndarray, uniforms_R: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Draw one token per row.

    Args:
        logits_RV: float32.
        temperature_R: 0 is greedy; such a row ignores top-p and top-k and its logprob is that at temperature 1.
        top_p_R: Smallest set of likeliest tokens that reaches this mass, after top-k.
        top_k_R: 0 turns it off.
        uniforms_R: From `uniforms`.

    Returns:
        ids [R] int64, logprobs [R] float32 of the distribution drawn from.
    """
    device = logits_RV.device
    is_greedy = temperature_R == 0
    if not np.all(is_greedy | (temperature_R == 1)):
        divisors = np.where(is_greedy, 1, temperature_R).astype(np.float32)
        logits_RV = logits_RV / torch.from_numpy(divisors).to(device)[:, None]
    if is_greedy.all():
        logprobs_RV = logits_RV.log_softmax(-1)
        ids = logprobs_RV.argmax(-1)
        return ids.cpu().numpy(), logprobs_RV.gather(1, ids[:, None])[:, 0].cpu().numpy()
    numbers = torch.from_numpy(uniforms_R).to(device)
    is_cut = ~is_greedy & ((top_p_R < 1) | ((top_k_R > 0) & (top_k_R < logits_RV.shape[1])))
    if is_cut.any():
        top_p = torch.from_numpy(np.where(is_cut, top_p_R, 2).astype(np.float32)).to(device)
        top_k = torch.from_numpy(np.where(is_cut & (top_k_R > 0), top_k_R, logits_RV.shape[1]).astype(np.int64)).to(device)
        ids, logprobs = _sample_cut(logits_RV, top_p, top_k, numbers)
    else:
        probs_RV = logits_RV.softmax(-1)
        ids = _invert(probs_RV, numbers)
        logprobs = probs_RV.gather(1, ids).log_()[:, 0]
        ids = ids[:, 0]
    if is_greedy.any():
        greedy = torch.from_numpy(is_greedy).to(device)
        best_logits, best = logits_RV.max(-1)
        ids = torch.where(greedy, best, ids)
        logprobs = torch.where(greedy, best_logits - logits_RV.logsumexp(-1), logprobs)
    return ids.cpu().numpy(), logprobs.cpu().numpy()


def _sample_cut(
    logits_RV: torch.Tensor, top_p_R: torch.Tensor, top_k_R: torch.Tensor, numbers_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    ordered, order = logits_RV.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[1], device=ordered.device)
    ordered = ordered.masked_fill(ranks >= top_k_R[:, None], float("-inf"))
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    ordered = ordered.masked_fill((before >= top_p_R[:, None]) & (ranks > 0), float("-inf"))
    kept = ordered.softmax(-1)
    drawn = _invert(kept, numbers_R)
    return order.gather(1, drawn)[:, 0], kept.gather(1, drawn).log_()[:, 0]


def _invert(probs_RV: torch.Tensor, numbers_R: torch.Tensor) -> torch.Tensor:
    """[R, 1]: the first token whose cumulative probability exceeds the number; never one of probability 0."""
    cumulative = probs_RV.cumsum(-1)
    targets = numbers_R[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True).clamp_(max=probs_RV.shape[1] - 1)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
