"""GRPO's advantages against arithmetic done by hand."""

import math

import pytest

from psrl.algorithms.advantages import AdvantageBatch, advantage_estimators
from psrl.config.algorithm import AlgorithmConfig
from psrl.errors import ConfigError, TrainingError


def advantages(rows, *, divide=True):
    """Rows are (group, episode, reward)."""
    tags = [{"group": group, "episode": episode, "reward": reward} for group, episode, reward in rows]
    batch = AdvantageBatch(tags=tags, has_loss=[True] * len(tags))
    estimator = advantage_estimators.resolve("grpo")()
    return [float(a) for a in estimator.estimate(batch, AlgorithmConfig(norm_adv_by_std_in_grpo=divide)).advantages]


def test_two_right_of_four():
    # mean 0, squared deviations 1 each, sum 4 over n - 1 = 3, root 1.154701; 1 / 1.154701 = 0.866025
    rows = [("g", f"e{i}", reward) for i, reward in enumerate([1.0, 1.0, -1.0, -1.0])]
    assert advantages(rows) == pytest.approx([0.866025, 0.866025, -0.866025, -0.866025], abs=2e-6)


def test_without_division_the_advantage_is_the_distance_to_the_mean():
    # mean of 1, 0, 0, 0 is 0.25
    rows = [("g", f"e{i}", reward) for i, reward in enumerate([1.0, 0.0, 0.0, 0.0])]
    assert advantages(rows, divide=False) == pytest.approx([0.75, -0.25, -0.25, -0.25])


def test_groups_are_found_by_uid_when_rows_are_interleaved_and_sizes_differ():
    # a: 1, -1 -> mean 0, deviation sqrt(2) -> 0.707107. b: 3, 0, 0 -> mean 1, deviation sqrt((4 + 1 + 1) / 2) = 1.732051
    rows = [("b", "b0", 3.0), ("a", "a0", 1.0), ("b", "b1", 0.0), ("a", "a1", -1.0), ("b", "b2", 0.0)]
    assert advantages(rows) == pytest.approx([1.154700, 0.707106, -0.577350, -0.707106, -0.577350], abs=2e-6)


def test_a_group_that_lost_a_member_uses_the_mean_of_those_left():
    # 1, 0 of what were four: mean 0.5, not 0.25
    assert advantages([("g", "e0", 1.0), ("g", "e3", 0.0)], divide=False) == [0.5, -0.5]


def test_a_group_of_one_has_no_baseline_and_advantage_zero():
    assert advantages([("g", "e0", 1.0), ("h", "e1", -1.0)]) == [0.0, 0.0]


@pytest.mark.parametrize("divide", [True, False])
def test_equal_rewards_give_exactly_zero(divide):
    # 0.1 has no exact float: a mean of three of them differs from 0.1 by rounding, which division by the deviation would blow up
    assert advantages([("g", f"e{i}", 0.1) for i in range(3)], divide=divide) == [0.0, 0.0, 0.0]


def test_an_episode_with_three_branches_counts_once():
    # episodes 1 and 0: mean 0.5; counted by trajectory the mean would be 0.75
    rows = [("g", "e0", 1.0), ("g", "e0", 1.0), ("g", "e0", 1.0), ("g", "e1", 0.0)]
    assert advantages(rows, divide=False) == [0.5, 0.5, 0.5, -0.5]


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_name(reward):
    with pytest.raises(TrainingError, match="e7"):
        advantages([("g", "e7", reward)])


def test_branches_that_disagree_about_the_reward_are_refused():
    with pytest.raises(TrainingError, match="e0"):
        advantages([("g", "e0", 1.0), ("g", "e0", 0.0)])


def test_an_unknown_estimator_is_a_config_error_that_lists_the_known():
    with pytest.raises(ConfigError, match="grpo"):
        advantage_estimators.resolve("gae2")
