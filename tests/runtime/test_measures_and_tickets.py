"""Metrics of a step by hand numbers; seeds that depend on what an episode is and never on when it runs."""

import itertools
from dataclasses import replace
from statistics import fmean

import pytest

from psrl.data_plane.memory import meta_of
from psrl.runtime.groups import EpisodeSummary, GroupResult
from psrl.runtime.measures import pass_at_k, seconds_by_use, step_metrics, validation_metrics
from psrl.runtime.tickets import seed_of, training_tickets, validation_tickets
from psrl.telemetry.names import TimeUse
from psrl.telemetry.trajectories import lengths_of_turns
from psrl.types import Outcome, Step, Task, Timings, Trajectory


def summary(*, reward, accuracy, counts=None, outcome=Outcome.FINISHED, temperature=None) -> EpisodeSummary:
    return EpisodeSummary(
        uid="e",
        outcome=outcome,
        reward=reward,
        accuracy=accuracy,
        num_turns=2,
        num_sampled=10,
        counts=counts or {},
        timings=Timings(total_s=4.0, generation_s=3.0, tools_s=0.5, reward_s=0.25),
        temperature=temperature,
        error=None,
        num_retries=0,
    )


def group(*summaries: EpisodeSummary, uid: str = "g") -> GroupResult:
    return GroupResult(group=uid, summaries=summaries, meta=meta_of([]), records=())


TASK = Task(uid="train-0-7", prompt=(), data_source="test")


def test_step_metrics_are_means_over_episodes():
    metrics = step_metrics(
        [
            group(
                summary(reward=1.0, accuracy=1.0, counts={"tool_turns": 1, "env/hints": 2}),
                summary(reward=-1.0, accuracy=0.0, counts={"tool_errors/timeout": 1, "tool_errors/exception": 2}),
            ),
            group(summary(reward=None, accuracy=None, outcome=Outcome.INFRA_ERROR), summary(reward=0.0, accuracy=0.0)),
        ]
    )
    # Rewards 1, -1, 0: mean 0, population variance 2/3.
    assert metrics["reward/episode/mean"] == 0.0
    assert metrics["reward/episode/std"] == pytest.approx((2 / 3) ** 0.5)
    assert metrics["accuracy/episode/mean"] == pytest.approx(1 / 3)
    assert metrics["episode/tool_rate/mean"] == 0.25
    assert metrics["episode/tool_errors/mean"] == 0.75
    assert metrics["env/hints"] == 0.5
    assert metrics["generation/tokens/count"] == 40


def test_what_sessions_count_is_told_and_absent_without_sessions():
    first = {"branches": 2.0, "sampling_overrides/temperature": 3.0, "sampling_overrides/seed": 1.0, "agent/calls": 5.0}
    episodes = [summary(reward=1.0, accuracy=1.0, counts=first), summary(reward=0.0, accuracy=0.0, counts={"branches": 0.0})]
    metrics = step_metrics([group(*episodes)])
    assert metrics["session/branches/mean"] == 1.0
    assert metrics["session/sampling_overrides/mean"] == 2.0
    assert metrics["session/drift/tokens"] == 0.0
    assert metrics["agent/calls"] == 2.5
    native = step_metrics([group(summary(reward=1.0, accuracy=1.0))])
    assert not any(name.startswith("session/") for name in native)


def test_waiting_is_divided_by_what_episodes_waited_for():
    episode = summary(reward=1.0, accuracy=1.0)
    assert seconds_by_use([group(episode, episode)]) == {TimeUse.GENERATION: 6.0, TimeUse.TOOLS: 1.0, TimeUse.REWARD: 0.5}


def test_validation_tells_greedy_from_sampled_and_counts_failures_as_unsolved():
    metrics = validation_metrics(
        [
            group(
                summary(reward=1.0, accuracy=1.0),
                summary(reward=None, accuracy=None, outcome=Outcome.INFRA_ERROR),
                summary(reward=1.0, accuracy=1.0, temperature=0.0),
            )
        ],
        version=0,
        sources={"g": "test"},
    )
    assert metrics["val/mean_at_n/accuracy"] == 0.5
    assert metrics["val/pass_at_2/accuracy"] == 1.0  # one of its two samples solved the task
    assert metrics["val/greedy/accuracy"] == 1.0
    assert "val/other_version/share" not in metrics


def test_validation_says_when_tokens_came_from_other_weights():
    right, wrong = (replace(group(summary(reward=1.0, accuracy=1.0)), oldest_version=version) for version in (3, 4))
    assert validation_metrics([right, wrong], version=3, sources={"g": "test"})["val/other_version/share"] == 0.5


def played(uid: str, *solved: int) -> GroupResult:
    return group(*(summary(reward=float(one), accuracy=float(one)) for one in solved), uid=uid)


def test_pass_at_k_is_the_share_of_k_subsets_that_hold_a_right_one():
    # Unbiased means: the mean over all subsets of k of the n samples, which is counted here one by one.
    for num_sampled in range(1, 8):
        for num_solved in range(num_sampled + 1):
            samples = [1] * num_solved + [0] * (num_sampled - num_solved)
            for k in range(1, num_sampled + 1):
                subsets = list(itertools.combinations(samples, k))
                assert pass_at_k(num_sampled, num_solved, k) == pytest.approx(fmean(any(subset) for subset in subsets), abs=1e-12)
    assert pass_at_k(4, 2, 2) == pytest.approx(5 / 6)
    with pytest.raises(AssertionError, match="needs 5 samples"):
        pass_at_k(4, 2, 5)


def test_validation_tells_pass_at_powers_of_two_and_at_n_by_data_source():
    groups = [played("a", 1, 1, 0, 0, 0, 0), played("b", 0, 0, 0, 0, 0, 0), played("c", 1, 1, 1, 1, 1, 1)]
    metrics = validation_metrics(groups, version=0, sources={"a": "aime_2024", "b": "aime_2024", "c": "openai/gsm8k"})
    accuracies = {name[4:-9]: value for name, value in metrics.items() if name.endswith("/accuracy")}
    # Task a: 1 - C(4,2)/C(6,2) = 1 - 6/15 = 0.6; 1 - C(4,4)/C(6,4) = 14/15; 1 of 6.
    assert accuracies == pytest.approx(
        {
            "mean_at_n": (2 + 0 + 6) / 18,
            "pass_at_2": (0.6 + 0 + 1) / 3,
            "pass_at_4": (14 / 15 + 0 + 1) / 3,
            "pass_at_6": (1 + 0 + 1) / 3,
            "mean_at_n.aime_2024": 2 / 12,
            "pass_at_2.aime_2024": 0.3,
            "pass_at_4.aime_2024": 7 / 15,
            "pass_at_6.aime_2024": 0.5,
            **{f"{kind}.openai.gsm8k": 1.0 for kind in ("mean_at_n", "pass_at_2", "pass_at_4", "pass_at_6")},
        }
    )


def test_one_data_source_has_no_metrics_of_its_own_and_one_sample_no_pass_at_k():
    metrics = validation_metrics([played("a", 1), played("b", 0)], version=0, sources={"a": "x", "b": "x"})
    assert {name for name in metrics if name.endswith("accuracy")} == {"val/mean_at_n/accuracy"}


def branch(*turns: tuple[list[int], list[int]]) -> Trajectory:
    trajectory = Trajectory(uid="t")
    for observed, sampled in turns:
        trajectory.append(
            Step(
                observation_ids=observed,
                sampled_ids=sampled,
                logprobs=[0.0] * len(sampled),
                policy_versions=[0] * len(sampled),
                temperature=1.0,
                finish_reason="stop",
            )
        )
    return trajectory


def test_a_turn_that_two_branches_begin_with_was_sampled_once():
    first = ([1, 2], [3, 4, 5])
    assert lengths_of_turns([branch(first, ([6], [7, 8])), branch(first, ([9], [7, 8]))]) == [3, 2, 2]
    assert lengths_of_turns([branch(first), branch(([1, 2], [3, 4, 6]))]) == [3, 3]
    assert lengths_of_turns([]) == []


def test_an_episode_that_is_issued_again_has_its_seed_and_members_differ():
    first = training_tickets(TASK, rollout_n=4, version=0, run_seed=3)
    again = training_tickets(TASK, rollout_n=4, version=5, run_seed=3)
    assert [ticket.seed for ticket in first] == [ticket.seed for ticket in again]
    assert len({ticket.seed for ticket in first}) == 4
    assert training_tickets(TASK, rollout_n=1, version=0, run_seed=4)[0].seed != first[0].seed


def test_validation_asks_for_the_same_numbers_at_every_version():
    early, late = (validation_tickets(TASK, num_sampled=2, is_greedy_too=True, version=v, run_seed=1) for v in (0, 9))
    assert [ticket.seed for ticket in early] == [ticket.seed for ticket in late]
    assert [ticket.temperature for ticket in early] == [None, None, 0.0]
    assert not {ticket.uid for ticket in early} & {ticket.uid for ticket in late}


def test_seeds_fit_a_signed_64_bit_integer():
    assert all(0 <= seed_of(1, str(uid)) < 2**62 for uid in range(1000))
