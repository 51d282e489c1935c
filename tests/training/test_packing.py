"""Micro-batches: equal steps for every rank, nothing lost, nothing cut; padding is never scored."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.errors import RowTooLongError
from psrl.training.packing import model_inputs, pack


def lengths_of(steps):
    return [[[len(row) for row in batch.rows] for batch in ranks] for ranks in steps]


def test_the_documented_example():
    assert lengths_of(pack(["a" * 6, "b" * 3, "c" * 3], max_tokens=6, num_ranks=2)) == [[[6], [3, 3]]]


def test_padding_counts_against_the_limit():
    # 6 and 3 together would be padded to 12
    assert lengths_of(pack(["a" * 6, "b" * 3], max_tokens=9, num_ranks=1)) == [[[6]], [[3]]]


def test_a_rank_without_rows_gets_an_all_masked_micro_batch():
    assert lengths_of(pack(["a" * 6], max_tokens=6, num_ranks=2)) == [[[6], []]]


def test_rows_that_fit_one_micro_batch_are_still_shared_by_the_ranks():
    assert lengths_of(pack(["a" * 3] * 4, max_tokens=100, num_ranks=2)) == [[[3, 3], [3, 3]]]


def test_a_row_too_long_is_an_error_that_names_it_and_the_setting():
    with pytest.raises(RowTooLongError, match=r"row 1 has 7 tokens.*ppo_max_token_len_per_gpu"):
        pack(["a", "b" * 7], max_tokens=6, num_ranks=1)


@settings(max_examples=150, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), max_size=40), max_tokens=st.integers(50, 400), num_ranks=st.integers(1, 5))
def test_every_row_is_packed_once_within_the_limit_and_ranks_step_together(lengths, max_tokens, num_ranks):
    rows = [(index,) * length for index, length in enumerate(lengths)]
    steps = pack(rows, max_tokens=max_tokens, num_ranks=num_ranks)
    assert all(len(ranks) == num_ranks for ranks in steps)
    batches = [batch for ranks in steps for batch in ranks]
    assert sorted(row[0] for batch in batches for row in batch.rows) == list(range(len(rows)))
    assert all(batch.num_padded_tokens <= max_tokens for batch in batches)
    for batch in batches:
        order = [row[0] for row in batch.rows]
        assert order == sorted(order)
    if len(rows) >= num_ranks * len(steps):
        assert all(batch.rows for batch in batches), "a rank idles although there are rows to split"


def test_pad_scores_exactly_the_masked_tokens_from_the_state_before():
    rows = [(torch.tensor([5, 6, 7]), torch.tensor([0, 1, 1])), (torch.tensor([8, 9]), torch.tensor([0, 1]))]
    batch = model_inputs(rows)
    assert batch.input_ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch.chosen.tolist() == [6, 7, 9]
    assert batch.states.tolist() == [0, 1, 3]


def test_a_first_token_with_mask_1_is_a_programmers_mistake():
    with pytest.raises(AssertionError, match="first token"):
        model_inputs([(torch.tensor([5, 6]), torch.tensor([1, 1]))])
