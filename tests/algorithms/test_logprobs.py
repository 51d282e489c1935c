"""Scoring never holds the logits of all tokens, nor their gradient, and equals the plain way."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from psrl.algorithms.logprobs import chosen_logprobs


class LargestTensor(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation gives, forward or backward."""

    def __init__(self):
        super().__init__()
        self.num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


@pytest.mark.parametrize("entropy_needs_grad", [False, True])
def test_neither_logits_nor_their_gradient_are_held_for_all_tokens(entropy_needs_grad):
    num_tokens, width, vocabulary = 600, 4, 50
    torch.manual_seed(0)
    hidden, weight = torch.randn(num_tokens, width, requires_grad=True), torch.randn(vocabulary, width, requires_grad=True)
    chosen = torch.randint(0, vocabulary, (num_tokens,))
    with LargestTensor() as largest:
        logprobs, entropy = chosen_logprobs(
            hidden, weight, chosen, torch.ones(num_tokens), entropy_needs_grad=entropy_needs_grad, max_chunk_logits=60 * vocabulary
        )
        (logprobs.sum() + entropy.sum() * float(entropy_needs_grad)).backward()
    # the states themselves have 2,400 elements, all logits would have 30,000
    assert largest.num_elements == 60 * vocabulary


@pytest.mark.parametrize("needs_grad", ["logprobs", "entropy", "both"])
def test_values_and_gradients_equal_the_plain_way_to_1e_6(needs_grad):
    """The plain way in float64 is the truth; both in float32 may be off by rounding only."""
    torch.manual_seed(1)
    hidden, weight = torch.randn(40, 16), torch.randn(31, 16) * 0.3
    chosen, temperatures, mix = torch.randint(0, 31, (40,)), torch.rand(40) + 0.5, torch.randn(2, 40)
    mix = mix * torch.tensor({"logprobs": [1.0, 0.0], "entropy": [0.0, 1.0], "both": [1.0, 1.0]}[needs_grad])[:, None]
    ours = [t.clone().requires_grad_() for t in (hidden, weight)]
    logprobs, entropy = chosen_logprobs(*ours, chosen, temperatures, entropy_needs_grad=True, max_chunk_logits=31 * 7)
    ((logprobs * mix[0]).sum() + (entropy * mix[1]).sum()).div(40).backward()
    plain = [t.double().requires_grad_() for t in (hidden, weight)]
    log_probs = torch.log_softmax((plain[0] @ plain[1].T) / temperatures.double()[:, None], -1)
    expected = log_probs[torch.arange(40), chosen]
    expected_entropy = -(log_probs.exp() * log_probs).sum(-1)
    ((expected * mix[0].double()).sum() + (expected_entropy * mix[1].double()).sum()).div(40).backward()
    assert torch.allclose(logprobs.double(), expected, atol=1e-6, rtol=1e-6)
    assert torch.allclose(entropy.double(), expected_entropy, atol=1e-6, rtol=1e-6)
    for left, right in zip(ours, plain, strict=True):
        assert torch.allclose(left.grad.double(), right.grad, atol=1e-6, rtol=1e-5)


def test_a_frozen_output_embedding_gets_no_gradient_and_no_tokens_give_zero():
    hidden, weight = torch.randn(5, 3, requires_grad=True), torch.randn(7, 3)
    logprobs, _ = chosen_logprobs(hidden, weight, torch.zeros(5, dtype=torch.int64), torch.ones(5))
    logprobs.sum().backward()
    assert weight.grad is None
    assert hidden.grad.abs().sum() > 0
    nothing = torch.zeros(0, 3, requires_grad=True)
    logprobs, _ = chosen_logprobs(nothing, weight, torch.zeros(0, dtype=torch.int64), torch.ones(0))
    logprobs.sum().backward()
    assert nothing.grad.shape == (0, 3)
