"""Logprobs and entropy of chosen tokens, from hidden states, a chunk of tokens at a time.

One function scores everything that is trained on (policy, reference, SFT), so temperature is applied once and in one
place. No more than `MAX_CHUNK_LOGITS` logits are alive at a time: with gradients, each further chunk is computed again in
the backward pass.

Legend: N tokens to score, H hidden width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MAX_CHUNK_LOGITS = 2**25
"""128 MiB in float32; below that a chunk's matrix product already keeps two cores or a GPU busy."""


def chosen_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    chosen_N: Tensor,
    temperatures_N: Tensor,
    *,
    bias_V: Tensor | None = None,
    entropy_needs_grad: bool = False,
    max_chunk_logits: int = MAX_CHUNK_LOGITS,
) -> tuple[Tensor, Tensor]:
    """Score one chosen token per hidden state.

    Args:
        hidden_NH: States that predict the chosen tokens.
        weight_VH: The output embedding.
        chosen_N: Token ids.
        temperatures_N: What the logits are divided by; the sampler's temperature, so that both sides mean the same distribution.
        bias_V: The output embedding's bias.
        entropy_needs_grad: False keeps the entropy as a number for metrics.
        max_chunk_logits: Most logits (tokens times vocabulary) computed at a time.

    Returns:
        (logprobs_N, entropy_N) in float32; entropy in nats.

    Example:
        Logits [0, ln 3] at temperature 1: the second token has logprob ln(3/4), the entropy is 0.5623.
    """
    num_tokens, vocabulary = hidden_NH.shape[0], weight_VH.shape[0]
    chunk = max(1, max_chunk_logits // vocabulary)
    if num_tokens <= chunk:
        return _score(hidden_NH, weight_VH, bias_V, chosen_N, temperatures_N, entropy_needs_grad)
    parts = []
    for start in range(0, num_tokens, chunk):
        span = slice(start, start + chunk)
        arguments = (hidden_NH[span], weight_VH, bias_V, chosen_N[span], temperatures_N[span], entropy_needs_grad)
        parts.append(checkpoint(_score, *arguments, use_reentrant=False) if torch.is_grad_enabled() else _score(*arguments))
    return torch.cat([logprobs for logprobs, _ in parts]), torch.cat([entropy for _, entropy in parts])


def _score(
    hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, chosen_N: Tensor, temperatures_N: Tensor, entropy_needs_grad: bool
) -> tuple[Tensor, Tensor]:
    logits_NV = F.linear(hidden_NH, weight_VH, bias_V).float().div_(temperatures_N[:, None])
    log_probs_NV = F.log_softmax(logits_NV, dim=-1)
    chosen = log_probs_NV.gather(1, chosen_N[:, None]).squeeze(1)
    if entropy_needs_grad:
        return chosen, -(log_probs_NV.exp() * log_probs_NV).sum(-1)
    with torch.no_grad():
        return chosen, -(log_probs_NV.exp() * log_probs_NV).sum(-1)
