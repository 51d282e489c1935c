"""Logprobs and entropy of chosen tokens, from hidden states, a chunk of tokens at a time.

One function scores everything that is trained on (policy, reference, SFT), so temperature is applied once and in one
place. Neither logits nor their gradient are ever held for all tokens: each chunk's are computed, used and written over, and computed
again in the backward pass. What stays between the two passes is one normaliser and one entropy per token.

Legend: N tokens to score, C tokens of a chunk, H hidden width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from psrl.kernels.products import add_product, linear, product

MAX_CHUNK_LOGITS = 2**23
"""32 MiB in float32, of which the backward pass holds two. Larger chunks were not faster; much smaller ones are, because the gradient of
the output embedding is read and written once per chunk."""


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
    chunk = max(1, max_chunk_logits // weight_VH.shape[0])
    logprobs_N, entropy_N = _ChunkedScore.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias_V, chosen_N, temperatures_N, chunk
    )
    return logprobs_N, entropy_N if entropy_needs_grad else entropy_N.detach()


class _ChunkedScore(torch.autograd.Function):
    """(logprobs_N, entropy_N) with a backward pass that computes each chunk's logits again.

    With z the logits over the temperature t, p their softmax, S the entropy: d logprob / dz_v = [v is chosen] - p_v and
    dS / dz_v = -p_v (log p_v + S).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        chosen_N: Tensor,
        temperatures_N: Tensor,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs_N, entropy_N, normaliser_N = torch.empty(3, len(hidden_NH), dtype=torch.float32, device=hidden_NH.device)
        for span in _spans(len(hidden_NH), chunk):
            z_CV = _scaled_logits(hidden_NH[span], weight_VH, bias_V, temperatures_N[span])
            log_z_C = z_CV.logsumexp(-1)
            logprobs_N[span] = z_CV.gather(1, chosen_N[span, None]).squeeze(1) - log_z_C
            # S = log Z - sum_v p_v z_v; where p_v is 0 a logit of -inf would make the product NaN, which no model gives.
            p_CV = (z_CV - log_z_C[:, None]).exp_()
            entropy_N[span] = log_z_C - p_CV.mul_(z_CV).sum(-1)
            normaliser_N[span] = log_z_C
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, chosen_N, temperatures_N, normaliser_N, entropy_N)
        ctx.chunk = chunk
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_N: Tensor, grad_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, chosen_N, temperatures_N, normaliser_N, entropy_N = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden_NH = torch.empty_like(hidden_NH) if needs_hidden else None
        # Sums over chunks are kept in float32 whatever the weights are in.
        grad_weight_VH = torch.zeros_like(weight_VH, dtype=torch.float32) if needs_weight else None
        grad_bias_V = torch.zeros_like(bias_V, dtype=torch.float32) if needs_bias else None
        has_entropy = grad_entropy_N is not None and bool(grad_entropy_N.any())
        for span in _spans(len(hidden_NH), ctx.chunk):
            z_CV = _scaled_logits(hidden_NH[span], weight_VH, bias_V, temperatures_N[span])
            log_p_CV = z_CV.sub_(normaliser_N[span, None])
            grad_C = grad_logprobs_N[span]
            if has_entropy:
                assert grad_entropy_N is not None
                p_CV = log_p_CV.exp()
                of_entropy_CV = log_p_CV.add_(entropy_N[span, None]).mul_(grad_entropy_N[span, None]).add_(grad_C[:, None])
                grad_z_CV = p_CV.mul_(of_entropy_CV).neg_()
            else:
                grad_z_CV = log_p_CV.exp_().mul_(-grad_C[:, None])
            grad_z_CV.scatter_add_(1, chosen_N[span, None], grad_C[:, None])
            grad_z_CV.div_(temperatures_N[span, None])
            typed_CV = grad_z_CV.to(weight_VH.dtype)
            if grad_hidden_NH is not None:
                product(typed_CV, weight_VH, out=grad_hidden_NH[span])
            if grad_weight_VH is not None:
                add_product(grad_weight_VH, typed_CV.t(), hidden_NH[span])
            if grad_bias_V is not None:
                grad_bias_V += grad_z_CV.sum(0)
        return (
            grad_hidden_NH,
            None if grad_weight_VH is None else grad_weight_VH.to(weight_VH.dtype),
            None if grad_bias_V is None else grad_bias_V.to(bias_V.dtype),
            None,
            None,
            None,
        )


def _spans(num_tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(start, min(start + chunk, num_tokens)) for start in range(0, num_tokens, chunk))


def _scaled_logits(hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperatures_C: Tensor) -> Tensor:
    return linear(hidden_CH, weight_VH, bias_V).float().div_(temperatures_C[:, None])
