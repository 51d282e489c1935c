"""Rows packed behind one another, with shared beginnings computed once, are trained on exactly as padded rows are; none sees another."""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_builders import largest_difference, make_rank, make_rows, save_model_with_sliding_windows, stored

from psrl.config.model import ModelConfig
from psrl.errors import ConfigError
from psrl.training import attention, shared_prefixes
from psrl.training.model import load_model
from psrl.training.packing import Arrangement, model_inputs, pack
from psrl.training.shared_prefixes import shared_beginnings

VOCABULARY = 48


def groups_of_rows(seed=0, num_groups=3, group_size=4, prompt=12):
    """Groups with a prompt each, one row twice, a branch of another row, and a row that is alone."""
    draw = random.Random(seed)
    rows = []
    for group in range(num_groups):
        shared = [draw.randrange(VOCABULARY) for _ in range(prompt + group)]
        for _ in range(group_size):
            length = draw.randint(1, 30)
            ids = torch.tensor(shared + [draw.randrange(VOCABULARY) for _ in range(length)])
            rows.append((ids, torch.tensor([0] * len(shared) + [1] * length)))
    rows.append(rows[0])
    ids, mask = rows[1]
    branch = torch.cat((ids[:-1], torch.tensor([int(ids[-1] + 1) % VOCABULARY, 5])))
    rows.append((branch, torch.cat((torch.zeros(len(mask) - 1, dtype=mask.dtype), torch.tensor([1, 1])))))
    rows.append((torch.tensor([1, 2, 3]), torch.tensor([0, 0, 1])))
    draw.shuffle(rows)
    return rows


def scored(policy, rows, arrangement, weights=None):
    """(logprobs, entropy, gradients of their weighted sum by name)."""
    inputs = model_inputs(rows, arrangement=arrangement)
    policy.zero_grad()
    logprobs, entropy = policy(
        inputs.input_ids, inputs.states, inputs.chosen, torch.ones(len(inputs.chosen)), layout=inputs.layout, entropy_needs_grad=True
    )
    weights = torch.linspace(-1, 1, len(logprobs)) if weights is None else weights
    ((logprobs + 0.1 * entropy) * weights).mean().backward()
    return logprobs.detach(), entropy.detach(), {name: p.grad.clone() for name, p in policy.named_parameters()}


@pytest.fixture(scope="module")
def policy(tiny_model):
    return load_model(ModelConfig(path=str(tiny_model)))


@pytest.fixture
def small_buckets(monkeypatch):
    """So that rows of one micro-batch go through several calls of the kernel."""
    monkeypatch.setattr(attention, "MIN_BUCKET_TOKENS", 1)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("arrangement", [Arrangement.PACKED, Arrangement.SHARED])
def test_logprobs_entropies_and_gradients_equal_those_of_padded_rows(policy, small_buckets, arrangement, seed):
    rows = groups_of_rows(seed)
    expected, found = (scored(policy, rows, one) for one in (Arrangement.PADDED, arrangement))
    assert torch.allclose(found[0], expected[0], atol=1e-5, rtol=0)
    assert torch.allclose(found[1], expected[1], atol=1e-5, rtol=0)
    assert largest_difference(found[2], expected[2]) < 1e-5


def test_a_long_prefix_is_not_padding_for_those_with_a_short_one():
    # Own tokens 50 each; prefixes 4,000 and 20: 8 * 4,050 + 200 * 70 keys, where one bucket of them all would have 208 * 4,050.
    long, short = ([attention.Segment(0, 50, group, prefix) for group in range(num)] for num, prefix in ((8, 4_000), (200, 20)))
    layout = attention.RowLayout(segments=(*long, *short), device=torch.device("cpu"))
    assert sum(bucket.keys.size for bucket in layout.buckets) == 8 * 4_050 + 200 * 70


def test_short_segments_have_the_keys_of_their_prefix_once_and_long_ones_each():
    # 8 of 3 tokens after 91: 91 + 24 keys; joining two of 300 would give 2 * 300 * 300 pairs that are not seen, for 91 keys.
    short, long = ([attention.Segment(91 + n * length, length, 0, 91) for n in range(8)] for length in (3, 300))
    for segments, num_keys in ((short, 91 + 8 * 3), (long, 8 * (91 + 300))):
        layout = attention.RowLayout(segments=(attention.Segment(0, 91), *segments), device=torch.device("cpu"))
        with_prefix = [bucket for bucket in layout.buckets if bucket.mask is not None]
        assert sum(bucket.keys.size for bucket in with_prefix) == num_keys
        assert sum(bucket.mask.sum() for bucket in with_prefix) == sum(s.length * 91 + s.length * (s.length + 1) // 2 for s in segments)
        assert layout.gathered.queries[layout.gathered.places].tolist() == list(range(91 + 8 * segments[0].length))


def test_a_groups_prompt_lies_there_once(policy):
    rows = [(torch.arange(10 + n), torch.tensor([0] * 10 + [1] * n)) for n in (3, 4, 5)]
    rows = [(torch.cat((ids[:10], ids[10:] + index)), mask) for index, (ids, mask) in enumerate(rows)]
    assert model_inputs(rows, arrangement=Arrangement.PACKED).input_ids.shape == (1, 42)
    assert model_inputs(rows, arrangement=Arrangement.SHARED).input_ids.shape == (1, 22)


@pytest.mark.parametrize("arrangement", list(Arrangement))
def test_a_row_that_changes_leaves_the_others_logprobs_as_they_are(policy, arrangement):
    rows = groups_of_rows()
    places = list(itertools.accumulate((int(mask.sum()) for _, mask in rows), initial=0))
    before, _, _ = scored(policy, rows, arrangement)
    for number in (0, 7, 13):
        ids, mask = rows[number]
        changed = torch.where(mask.bool(), (ids + 7) % VOCABULARY, ids)
        after, _, _ = scored(policy, [*rows[:number], (changed, mask), *rows[number + 1 :]], arrangement)
        own = torch.zeros(len(before), dtype=torch.bool)
        own[places[number] : places[number + 1]] = True
        assert torch.allclose(after[~own], before[~own], atol=1e-5, rtol=0)  # rounding differs where a row no longer shares
        assert (after[own] - before[own]).abs().max() > 1e-3


@pytest.mark.parametrize("arrangement", list(Arrangement))
def test_the_gradient_of_a_rows_logprobs_reaches_its_own_tokens_only(policy, arrangement):
    rows = groups_of_rows()
    inputs = model_inputs(rows, arrangement=arrangement)
    embedded = []
    hook = policy.causal_lm.get_input_embeddings().register_forward_hook(lambda _, __, out: embedded.append(out) or out.retain_grad())
    logprobs, _ = policy(inputs.input_ids, inputs.states, inputs.chosen, torch.ones(len(inputs.chosen)), layout=inputs.layout)
    hook.remove()
    places = list(itertools.accumulate((int(mask.sum()) for _, mask in rows), initial=0))
    for number in (0, 7, 13):
        ids, _ = rows[number]
        embedded[-1].grad = None
        logprobs[places[number] : places[number + 1]].sum().backward(retain_graph=True)
        reached = embedded[-1].grad.abs().sum(-1).flatten().nonzero().squeeze(1)
        assert inputs.input_ids.flatten()[reached].tolist() == ids[:-1].tolist(), "the last token of a row predicts nothing"


@pytest.mark.parametrize(
    "options",
    [
        {"ppo_max_token_len_per_gpu": 80},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_training_steps_are_the_same_however_rows_lie(tiny_model, monkeypatch, options):
    monkeypatch.setattr(shared_prefixes, "MIN_SHARED_TOKENS", 2)
    rows = make_rows(tiny_model, num_groups=3)
    for row in rows:  # the prompt of a group is the same for its members
        first = next(other for other in rows if other.tags["group"] == row.tags["group"])
        row.columns["input_ids"][:3] = first.columns["input_ids"][:3]
    found = []
    for use_remove_padding, use_prefix_grouper in [(False, False), (True, False), (True, True)]:
        data_plane, meta = stored(rows)
        trainer = make_rank(tiny_model, data_plane, use_remove_padding=use_remove_padding, use_prefix_grouper=use_prefix_grouper, **options)
        metrics = [trainer.train_step(meta, version=0) for _ in range(3)]
        found.append([step["train/loss/value"] for step in metrics] + [step["train/grad_norm/mean"] for step in metrics])
        trainer.close()
    assert found[1] == pytest.approx(found[0], rel=1e-5, abs=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5, abs=1e-5)


def test_a_model_with_sliding_windows_is_padded_or_refused(tmp_path):
    save_model_with_sliding_windows(tmp_path)
    data_plane, _ = stored([])
    with pytest.raises(ConfigError, match="use_remove_padding"):
        make_rank(tmp_path, data_plane)
    make_rank(tmp_path, data_plane, use_remove_padding=False, use_prefix_grouper=False).close()


def test_families_by_hand(monkeypatch):
    monkeypatch.setattr(shared_prefixes, "MIN_SHARED_TOKENS", 2)
    rows = [torch.tensor(ids).numpy() for ids in ([1, 2, 3, 4], [9, 9, 9], [1, 2, 3, 5, 6], [9, 9, 8], [1, 2, 3, 4], [7])]
    # the three rows that begin 1 2 3 save 2 * 3 tokens; the rows that begin 9 9 save 2
    assert [family for family in shared_beginnings(rows) if family[1]] == [([0, 2, 4], 3), ([1, 3], 2)]


short_rows = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(rows=short_rows)
def test_families_save_as_much_as_the_best_division_into_neighbours(rows):
    least, shared_prefixes.MIN_SHARED_TOKENS = shared_prefixes.MIN_SHARED_TOKENS, 1
    try:
        families = shared_beginnings([torch.tensor(row).numpy() for row in rows])
    finally:
        shared_prefixes.MIN_SHARED_TOKENS = least
    assert sorted(index for members, _ in families for index in members) == list(range(len(rows)))
    for members, num_shared in families:
        assert len({tuple(rows[index][:num_shared]) for index in members}) == 1
        assert all(len(rows[index]) > num_shared for index in members) or num_shared == 0
    saved = sum((len(members) - 1) * num_shared for members, num_shared in families)

    def worth(part):
        common = min(len(row) - 1 for row in part)
        while len({tuple(row[:common]) for row in part}) > 1:
            common -= 1
        return (len(part) - 1) * common

    ordered = sorted(rows)
    cuts = itertools.product([False, True], repeat=len(rows) - 1)
    best = 0
    for cut in cuts:
        ends = [0, *(place + 1 for place, is_cut in enumerate(cut) if is_cut), len(rows)]
        best = max(best, sum(worth(ordered[a:b]) for a, b in itertools.pairwise(ends)))
    assert saved == best


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 50), max_size=40), max_tokens=st.integers(50, 400), num_ranks=st.integers(1, 4), data=st.data())
def test_packed_rows_are_packed_once_within_the_limit_and_in_even_batches(lengths, max_tokens, num_ranks, data):
    groups = [data.draw(st.integers(0, 4)) for _ in lengths]
    rows = [(index,) * length for index, length in enumerate(lengths)]
    steps = pack(rows, max_tokens=max_tokens, num_ranks=num_ranks, arrangement=Arrangement.SHARED, groups=groups)
    batches = [batch for ranks in steps for batch in ranks]
    assert all(len(ranks) == num_ranks for ranks in steps)
    assert sorted(row[0] for batch in batches for row in batch.rows) == list(range(len(rows)))
    assert all(sum(map(len, batch.rows)) <= max_tokens for batch in batches)
    assert all(batch.arrangement is Arrangement.SHARED for batch in batches)


def test_a_group_stays_in_one_micro_batch_where_it_fits():
    rows = ["a" * 10, "b" * 9, "c" * 8, "d" * 7]
    steps = pack(rows, max_tokens=20, num_ranks=1, arrangement=Arrangement.SHARED, groups=["x", "y", "x", "y"])
    assert [[row[0] for row in batch.rows] for (batch,) in steps] == [["a", "c"], ["b", "d"]]
