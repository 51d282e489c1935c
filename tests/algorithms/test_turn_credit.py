"""Advantages that look inside an episode, and RLOO and GAE's edges, against arithmetic done by hand."""

import math

import pytest
import torch

from psrl.algorithms.advantages import AdvantageBatch, advantage_estimators
from psrl.algorithms.advantages.whitening import whitened
from psrl.config.algorithm import AlgorithmConfig
from psrl.errors import TrainingError


def row(group, episode, turns):
    """`turns` are (observed tokens, sampled tokens, reward)."""
    indices, rewards = [], []
    for number, (observed, sampled, reward) in enumerate(turns):
        indices += [-1] * observed + [number] * sampled
        rewards += [0.0] * (observed + sampled - 1) + [reward]
    indices = torch.tensor(indices, dtype=torch.int32)
    columns = {"turn_indices": indices, "loss_mask": (indices >= 0).to(torch.int8), "rewards": torch.tensor(rewards)}
    total = sum(reward for *_, reward in turns)
    return {"group": group, "episode": episode, "reward": total, "num_sampled": int((indices >= 0).sum())}, columns


def estimate(name, rows, *, values=(), has_loss=None, **settings):
    batch = AdvantageBatch(
        tags=[tags for tags, _ in rows], columns=[columns for _, columns in rows], has_loss=has_loss or [True] * len(rows), values=values
    )
    return advantage_estimators.resolve(name)().estimate(batch, AlgorithmConfig(**settings))


def by_token(name, rows, **settings):
    return [[round(float(value), 5) for value in each] for each in estimate(name, rows, **settings).advantages]


def test_step_return_compares_what_still_comes_at_the_same_turn():
    # gamma 0.5. Returns: a 1 + 0.5 * 0 = 1, then 0; b 0 + 0.5 * 2 = 1, then 2; c (one turn) 4. Turn 0: mean 2; turn 1 (a, b): mean 1.
    rows = [row("g", "a", [(1, 2, 1.0), (1, 1, 0.0)]), row("g", "b", [(1, 1, 0.0), (2, 1, 2.0)]), row("g", "c", [(1, 1, 4.0)])]
    expected = [[0, -1, -1, 0, -1], [0, -1, 0, 0, 1], [0, 2]]
    assert by_token("step_return", rows, gamma=0.5, norm_adv_by_std_in_grpo=False) == expected


def test_step_return_is_grpo_where_one_reward_comes_at_the_end_and_nothing_is_discounted():
    rows = [row("g", f"e{i}", [(1, 1, 0.0), (1, 2, reward)]) for i, reward in enumerate([1.0, 1.0, -1.0, -1.0])]
    steps = [each[each != 0].unique().item() for each in estimate("step_return", rows).advantages]
    assert steps == pytest.approx([float(each) for each in estimate("grpo", rows).advantages])


def test_a_turn_that_one_episode_alone_took_has_no_advantage():
    rows = [row("g", "a", [(1, 1, 0.0), (1, 1, 1.0)]), row("g", "b", [(1, 1, 0.0)])]
    assert by_token("step_return", rows, norm_adv_by_std_in_grpo=False) == [[0, 0.5, 0, 0], [0, -0.5]]


def test_mt_grpo_adds_what_later_turns_are_worth_to_a_turns_own_merit():
    # Turn 0 (its own rewards 1 and 0): 0.5, -0.5. Outcomes 0 and 2: -1, 1. alpha 0.5: 0.5 - 0.5 = 0 and -0.5 + 0.5 = 0.
    rows = [row("g", "a", [(1, 1, 1.0), (1, 1, 0.0)]), row("g", "b", [(1, 1, 0.0), (1, 1, 2.0)])]
    assert by_token("mt_grpo", rows, gamma=0.5, norm_adv_by_std_in_grpo=False) == [[0, 0, 0, -1], [0, 0, 0, 1]]
    assert by_token("mt_grpo", rows, gamma=1.0, norm_adv_by_std_in_grpo=False) == [[0, -0.5, 0, -1], [0, 0.5, 0, 1]]


def test_mt_grpo_compares_outcomes_whatever_the_number_of_turns():
    # Outcomes 1, 0, 2: mean 1 -> 0, -1, 1. Turn 0 of a and c (b ended with it), own rewards 1 and 0: 0.5, -0.5.
    rows = [row("g", "a", [(1, 1, 1.0), (1, 1, 1.0)]), row("g", "b", [(1, 1, 0.0)]), row("g", "c", [(1, 1, 0.0), (1, 1, 2.0)])]
    assert by_token("mt_grpo", rows, norm_adv_by_std_in_grpo=False) == [[0, 0.5, 0, 0], [0, -1], [0, 0.5, 0, 1]]


def test_groups_do_not_mix():
    rows = [row("g", "a", [(1, 1, 1.0)]), row("h", "b", [(1, 1, 5.0)]), row("g", "c", [(1, 1, 0.0)]), row("h", "d", [(1, 1, 7.0)])]
    for name in ("step_return", "mt_grpo"):
        assert by_token(name, rows, norm_adv_by_std_in_grpo=False) == [[0, 0.5], [0, -1], [0, -0.5], [0, 1]]


def test_leave_one_out_by_hand():
    # 1 - mean(0, 0, 0) = 1 and 0 - mean(1, 0, 0) = -1/3; a group of one has nobody to leave in
    rows = [row("g", f"e{i}", [(1, 1, reward)]) for i, reward in enumerate([1.0, 0.0, 0.0, 0.0])] + [row("h", "alone", [(1, 1, 3.0)])]
    assert [float(each) for each in estimate("rloo", rows).advantages] == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3, 0])


def test_gae_by_hand():
    # deltas 0 + 0.25 - 0.5 = -0.25 and 1 - 0.25 = 0.75; lam 0.5: -0.25 + 0.375 = 0.125 and 0.75; returns 0.625 and 1
    # whitened: mean 0.4375, both 0.3125 away, variance 2 * 0.3125^2 = 0.1953125, root 0.4419417 -> -0.7071, 0.7071
    estimates = estimate("gae", [row("g", "a", [(1, 1, 0.0), (2, 1, 1.0)])], values=[torch.tensor([0.5, 0.25])], lam=0.5)
    assert estimates.returns[0].tolist() == pytest.approx([0.625, 1.0])
    assert estimates.advantages[0].tolist() == pytest.approx([0, -math.sqrt(0.5), 0, 0, math.sqrt(0.5)], abs=1e-6)


def test_gae_leaves_trajectories_without_a_loss_out_of_the_statistics():
    rows = [row("g", "a", [(1, 1, 0.0), (2, 1, 1.0)]), row("g", "cut", [(1, 3, 100.0)])]
    values = [torch.tensor([0.5, 0.25]), torch.zeros(0)]
    estimates = estimate("gae", rows, values=values, has_loss=[True, False], lam=0.5)
    assert estimates.advantages[0].tolist() == pytest.approx([0, -math.sqrt(0.5), 0, 0, math.sqrt(0.5)], abs=1e-6)
    assert estimates.advantages[1].tolist() == [0.0] * 4
    assert len(estimates.returns[1]) == 0


def test_reinforce_plus_plus_leaves_them_out_too():
    rows = [row("g", "a", [(1, 1, 1.0)]), row("g", "b", [(1, 1, 0.0)]), row("h", "cut", [(1, 3, 100.0)])]
    advantages = estimate("reinforce_plus_plus", rows, has_loss=[True, True, False]).advantages
    assert [float(each[1]) for each in advantages[:2]] == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], abs=1e-5)


def test_whitening_counts_tokens():
    # 1 once and 0 three times: mean 1/4, variance (9/16 + 3/16) / 3 = 1/4
    assert [float(each) for each in whitened([torch.tensor(1.0), torch.tensor(0.0)], [1, 3])] == pytest.approx([1.5, -0.5], abs=1e-6)


@pytest.mark.parametrize("values", [[], [torch.tensor(3.0)]])
def test_fewer_than_two_tokens_have_nothing_to_be_compared_with(values):
    assert [float(each) for each in whitened(values, [1] * len(values))] == [0.0] * len(values)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "step_return", "mt_grpo"])
def test_a_step_reward_that_is_not_finite_is_refused_by_name(name):
    with pytest.raises(TrainingError, match="bad"):
        estimate(name, [row("g", "bad", [(1, 1, math.nan)])], values=[torch.zeros(1)])
