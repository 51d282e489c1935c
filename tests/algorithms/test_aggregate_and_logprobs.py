"""Aggregation gives one loss for any split; scoring agrees with the definition whatever the chunk."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.algorithms.aggregate import AggregationMode, aggregation_mode, count, raw_weights
from psrl.algorithms.logprobs import chosen_logprobs
from psrl.errors import ConfigError


def aggregated(mode, rows):
    """Rows are (values per token, turn per token)."""
    weights = [raw_weights(mode, torch.tensor(turns), length=8) for _, turns in rows]
    total = sum(count(mode, w) for w in weights)
    return float(sum((torch.tensor(values) * w).sum() for (values, _), w in zip(rows, weights, strict=True)) / total)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", 2.5),  # (1 + 1 + 1 + 5 + 4 + 3) / 6 = 15 / 6
        ("seq_mean", 2.75),  # means 8 / 4 = 2 and 7 / 2 = 3.5
        ("seq_sum", 15 / 16),  # (8 / 8 + 7 / 8) / 2, with length 8
        ("turn_mean", 19 / 6),  # turns: 1, 5, 3.5 -> 9.5 / 3
    ],
)
def test_two_trajectories_by_hand(mode, expected):
    rows = [([1.0, 1.0, 1.0, 5.0], [0, 0, 0, 1]), ([4.0, 3.0], [0, 0])]
    assert aggregated(aggregation_mode(mode), rows) == pytest.approx(expected, rel=1e-6)


def test_an_unknown_aggregation_is_a_config_error():
    with pytest.raises(ConfigError, match="token_mean, seq_mean, seq_sum, turn_mean"):
        aggregation_mode("mean")


rows_of_turns = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=7).map(sorted), min_size=1, max_size=8)


@settings(max_examples=80, deadline=None)
@given(mode=st.sampled_from(list(AggregationMode)), rows=rows_of_turns, data=st.data())
def test_any_split_into_micro_batches_gives_the_same_loss_and_gradient(mode, rows, data):
    sizes = [len(turns) for turns in rows]
    generator = torch.Generator().manual_seed(len(rows))
    whole = torch.randn(sum(sizes), generator=generator, requires_grad=True)
    weights = [raw_weights(mode, torch.tensor(turns), length=8) for turns in rows]
    total = sum(count(mode, w) for w in weights)
    loss = (whole.square() * torch.cat(weights)).sum() / total
    loss.backward()

    split = whole.detach().clone().requires_grad_()
    bin_of = [data.draw(st.integers(0, 3)) for _ in rows]
    parts = split.split(sizes)
    losses = []
    for number in range(4):
        chosen = [(parts[i], weights[i]) for i in range(len(rows)) if bin_of[i] == number]
        losses.append(sum((p.square() * w).sum() for p, w in chosen) / total if chosen else torch.zeros(()))
    sum(losses).backward()
    assert float(sum(losses).detach()) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert torch.allclose(split.grad, whole.grad, rtol=1e-5, atol=1e-7)


def test_logprob_and_entropy_by_hand():
    # logits [0, ln 3] -> probabilities 1/4, 3/4; entropy = ln(4) / 4 + 3/4 * ln(4/3) = 0.562335
    hidden, weight = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]])
    logprobs, entropy = chosen_logprobs(hidden, weight, torch.tensor([1]), torch.ones(1))
    assert float(logprobs) == pytest.approx(math.log(0.75), abs=1e-6)
    assert float(entropy) == pytest.approx(0.562335, abs=1e-6)


def test_temperature_divides_the_logits_of_its_own_row():
    # at temperature 2 the logits are [0, ln sqrt 3]: the second has probability sqrt 3 / (1 + sqrt 3) = 0.633975
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [math.log(3)]])
    logprobs, _ = chosen_logprobs(hidden, weight, torch.tensor([1, 1]), torch.tensor([1.0, 2.0]))
    assert logprobs.exp().tolist() == pytest.approx([0.75, 0.633975], abs=1e-6)


@pytest.mark.parametrize("max_chunk_logits", [1, 11 * 3, 11 * 1000])
def test_chunks_change_neither_values_nor_gradients(max_chunk_logits):
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(10, 4), torch.randn(11, 4), torch.randn(11)
    chosen, temperatures = torch.randint(0, 11, (10,)), torch.rand(10) + 0.5
    expected = torch.log_softmax((hidden @ weight.T + bias) / temperatures[:, None], -1)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    logprobs, entropy = chosen_logprobs(
        leaves[0], leaves[1], chosen, temperatures, bias_V=leaves[2], entropy_needs_grad=True, max_chunk_logits=max_chunk_logits
    )
    assert torch.allclose(logprobs, expected[torch.arange(10), chosen], atol=1e-5)
    assert torch.allclose(entropy, torch.distributions.Categorical(logits=expected).entropy(), atol=1e-5)
    plain = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
    log_probs = torch.log_softmax((plain[0] @ plain[1].T + plain[2]) / temperatures[:, None], -1)
    (log_probs[torch.arange(10), chosen].sum() + torch.distributions.Categorical(logits=log_probs).entropy().sum()).backward()
    (logprobs.sum() + entropy.sum()).backward()
    for ours, theirs in zip(leaves, plain, strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-4)
