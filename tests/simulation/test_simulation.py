"""Whole runs on virtual time: what can be worked out by hand, what must be conserved, and what the bound says."""

import itertools
import time
from dataclasses import replace
from pathlib import Path

import pytest
from simulation_kit import cluster, seconds, workload

import psrl
from psrl.errors import TooManyFailuresError
from psrl.simulation import Failures, Workload, bound_of, simulate
from psrl.simulation.instance import Pace
from psrl.simulation.simulation import NUM_KEPT, TICK_S, Simulation
from psrl.simulation.workload import DrawnEpisodes, rng_of

LONG_TAIL = "lognormal:median=1,sigma=1,max=20"


def run(cluster_, workload_, *, steps=20, warmup=5):
    return simulate(cluster_, workload_, num_steps=warmup + steps, num_warmup=warmup)


def test_a_synchronous_step_takes_generation_training_push_and_sync_one_after_the_other():
    # 2 groups of 2 on 2 slots, 1 s a turn: 2 s. Then 3 s of training, 0.5 s of push, 1 s of sync: 6.5 s for 4 episodes.
    report = run(cluster(slots=2), workload(1.0, train=3.0, push=0.5, sync=1.0))
    assert report.step_s == pytest.approx(6.5)
    assert report.episodes_per_s == pytest.approx(4 / 6.5)
    assert report.engines_busy == pytest.approx(4 / (2 * 6.5))
    assert report.trainer_training == pytest.approx(3 / 6.5)
    assert report.trainer_waiting == pytest.approx(3 / 6.5)
    assert report.staleness_shares == {0: 1.0}


def test_turns_tools_and_grading_of_an_episode_follow_each_other():
    # 3 turns of 1 s, 2 tool calls of 0.5 s, 0.25 s of grading: 4.25 s, and 1 s of training.
    report = run(cluster(), workload(1.0, tool=0.5, reward=0.25, turns=(3, 3), train=1.0))
    assert report.step_s == pytest.approx(5.25)


def test_a_synchronous_step_waits_for_its_longest_episode():
    # With a slot for everybody, step k lasts as long as the longest of its groups' episodes, which are drawn from the groups' names.
    drawn = DrawnEpisodes(turn=seconds(LONG_TAIL))
    longest = [
        max(plan.work[0] for index in (2 * step, 2 * step + 1) for plan in drawn.draw(rng_of(1, f"g{index:07d}"), 2)) for step in range(10)
    ]
    report = run(cluster(), workload(LONG_TAIL, train=1.0), steps=10, warmup=0)
    assert report.seconds == pytest.approx(sum(longest) + 10)


def test_with_staleness_the_longer_of_generation_and_training_decides():
    # Generation of a batch takes 2 s on 2 slots, training 3 s, both at once: 3 s a step; with 1 s of training, 2 s.
    assert run(cluster(slots=2, staleness=1), workload(1.0, train=3.0)).step_s == pytest.approx(3.0)
    assert run(cluster(slots=2, staleness=1), workload(1.0, train=1.0)).step_s == pytest.approx(2.0)


def test_engines_that_are_the_limit_work_all_the_time():
    # 4 slots, 1 s an episode: 4 episodes a second.
    report = run(cluster(slots=4, staleness=4), workload(1.0, train=0.1))
    assert report.episodes_per_s == pytest.approx(4.0)
    assert report.engines_busy == pytest.approx(1.0)
    assert report.bound_by == "engines" and report.bound_share == pytest.approx(1.0)


def test_the_places_of_agent_workers_are_a_limit_of_their_own():
    # 2 workers with 2 places each, 1 s of turn and 1 s of grading: 4 places / 2 s = 2 episodes a second.
    report = run(cluster(slots=100, workers=2, places=2, staleness=4), workload(1.0, reward=1.0))
    assert report.episodes_per_s == pytest.approx(2.0, rel=0.02)
    assert report.bound_by == "workers"


def test_the_bound_is_the_least_of_the_rates_of_its_parts():
    # Engines: 4 slots / (2 episodes x 2 turns x 1 s) = 1 group a second. Places: 1000 / (2 x 2.5 s) = 200. In flight: 500 groups / 2.5 s.
    # Trainer: 2 groups / 5 s.
    bound = bound_of(cluster(), workload(1.0, tool=0.5, turns=(2, 2), train=4.0, push=0.5, rest=0.5))
    assert (bound.engines, bound.workers, bound.in_flight, bound.trainer) == pytest.approx((1.0, 200.0, 200.0, 0.4))
    assert (bound.limiting, bound.episodes_per_s) == ("trainer", pytest.approx(0.8))


def test_redundant_members_cost_what_they_use_until_the_group_ends():
    # 3 members of 1 s play for a group of 2, all end together: 3 slot seconds a group, 4 slots.
    assert bound_of(cluster(redundant_episodes=1), workload(1.0)).engines == pytest.approx(4 / 3)


SLOWER_WITH_MORE = Pace(base_s=0.01, per_running_s=0.005)


def check_the_bound(turn, tool, turns, *, at_most=1.02, **more):
    episodes = DrawnEpisodes(turn=seconds(turn), tool=seconds(tool), min_turns=turns[0], max_turns=turns[1], is_work_in_tokens=True)
    work = Workload(episodes=episodes, pace=SLOWER_WITH_MORE, tokens_per_work=1.0)
    report = run(cluster(batch=8, slots=32, rollout_n=4, staleness=4, **more), work, steps=50, warmup=60)
    assert report.bound_share < at_most, (report.bound_by, turn, tool, turns, more)


@pytest.mark.parametrize("limit", [{"max_groups_in_flight": 2}, {"places": 16}])
def test_what_limits_before_the_slots_are_full_is_bounded_at_its_own_pace(limit):
    # 8 or 16 turns run at 0.01 + 0.005 each; with all 32 slots full a turn would take twice as long.
    check_the_bound("100", 0, (1, 1), **limit)
    check_the_bound("lognormal:median=60,sigma=1,max=600", 3, (1, 3), **limit)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [{"max_groups_in_flight": 2}, {"places": 16}, {}])
@pytest.mark.parametrize("turn", ["100", "lognormal:median=60,sigma=1,max=600"])
def test_no_simulated_throughput_passes_its_bound(turn, limit):
    for tool, turns, redundant, instances in itertools.product((0, 3), ((1, 1), (1, 3)), (0, 2), (1, 2)):
        # Chance: 400 groups. And redundant members that are cancelled while they wait for a slot are cheaper than the bound has it.
        check_the_bound(turn, tool, turns, redundant_episodes=redundant, instances=instances, at_most=1.05, **limit)


def test_an_instance_comes_back_with_the_weights_that_it_had_while_they_are_held():
    simulation = Simulation(cluster(staleness=4), workload(1.0, train=1.0))
    simulation.run(num_steps=6, num_warmup=0)
    instance, coordinator = simulation._instances[0], simulation._coordinator
    latest = coordinator.latest
    for served, expected in ((latest - 1, latest - 1), (latest - 2, latest), (0, 0)):
        instance.die()
        instance.version = served
        coordinator.instance_is_down(0)
        simulation._instance_comes_up(0)
        assert instance.version == coordinator.instances[0].version == expected


REDUNDANT = ({"redundant_groups": 2}, {"redundant_episodes": 1, "redundant_groups": 1})


@pytest.mark.parametrize("more", [{}, *(pytest.param(more, marks=pytest.mark.slow) for more in REDUNDANT)])
def test_throughput_grows_with_staleness_up_to_the_bound(more):
    work = workload(LONG_TAIL, tool=0.1, turns=(1, 3), train=1.0, sync=0.2, pause=0.05)
    rates = []
    for staleness in (0, 1, 2, 8, 32):
        report = run(cluster(batch=8, slots=16, instances=2, places=64, staleness=staleness, **more), work, steps=40, warmup=40)
        rates.append(report.episodes_per_s)
        assert max(report.staleness_shares) <= staleness
        assert report.bound_share < 1.03
    assert rates[0] < rates[1] < rates[2]
    assert rates[-1] > 0.9 * report.bound_episodes_per_s


def test_redundant_groups_pass_a_long_tail():
    work = workload("pareto:min=0.5,alpha=1.2,max=60", train=0.5)
    plain, redundant = (run(cluster(batch=8, slots=64, staleness=1, redundant_groups=more), work, steps=60) for more in (0, 4))
    assert redundant.step_s < 0.8 * plain.step_s


@pytest.mark.parametrize(
    ("partial", "step_s"),
    [
        # Turns of 4 s on 4 slots, an update every 4 s at most, a sync of 1 s that stands still for all of it. Kept or given back, the
        # turns of the next batch end 1 s later. Where running turns must end first, instances stand for the sync alone as well.
        ({"enable": True, "interrupt_as_prompt": False}, 5.0),
        ({"enable": True, "interrupt_as_prompt": True}, 5.0),
        ({"enable": False}, 5.0),
    ],
)
def test_a_sync_costs_its_pause(partial, step_s):
    from psrl.config.asynchrony import PartialRolloutConfig

    report = run(cluster(staleness=1, partial_rollout=PartialRolloutConfig(**partial)), workload(4.0, sync=1.0, pause=1.0, train=0.5))
    assert report.step_s == pytest.approx(step_s)


def test_everything_that_was_admitted_is_accounted_for():
    work = workload(
        LONG_TAIL, tool=0.1, turns=(1, 3), train=0.5, sync=0.2, pause=0.1, equal_share=0.2,
        failures=Failures(replica_per_s=0.02, worker_per_s=0.02, episode_share=0.05, restart_s=2.0),
    )  # fmt: skip
    small = cluster(
        batch=4, slots=8, instances=2, workers=2, places=20, staleness=2, redundant_episodes=1, redundant_groups=2, drops_equal=True,
        timeout_s=40.0, max_episode_retries=1,
    )  # fmt: skip
    report = run(small, work, steps=200)
    fates, episodes = dict(report.groups), dict(report.episodes)
    assert {"admitted", "trained", "filtered", "issued again"} <= set(fates)
    num_ended = sum(count for fate, count in fates.items() if fate != "admitted")
    assert fates["admitted"] == num_ended + report.groups_in_flight + report.groups_waiting
    assert fates["trained"] == 205 * 4
    assert report.engines_down > 0
    assert episodes["issued"] == episodes["judged"] + episodes["cancelled"] + episodes["given up"] + episodes["in flight"]
    assert min(episodes.values()) > 0


def test_the_same_seed_gives_the_same_run_and_another_one_another():
    work = workload(LONG_TAIL, turns=(1, 3), train=1.0, failures=Failures(replica_per_s=0.01, restart_s=1.0))
    first, again, other = (run(cluster(batch=4, slots=8, instances=2, staleness=2, seed=seed), work) for seed in (1, 1, 2))
    assert first == again
    assert first.seconds != other.seconds


def test_a_group_that_takes_too_long_is_replaced_or_cut():
    from psrl.config.asynchrony import ProactiveFilterConfig

    work = workload("pareto:min=0.5,alpha=0.8,max=500", train=0.5)
    plain = run(cluster(batch=4, slots=32), work)
    # Episodes of one turn have nothing to grade when they are cut: their groups are short of members.
    for action, fate in (("retry", "issued again"), ("truncate", "dropped"), ("null", "null")):
        settings = ProactiveFilterConfig(action=action, time_limit_s=5.0, max_per_step=100)
        report = run(cluster(batch=4, slots=32, proactive_filter=settings), work)
        assert report.step_s < 0.5 * plain.step_s, action
        assert report.groups[fate] > 20, action


def truncating(**more):
    from psrl.config.asynchrony import ProactiveFilterConfig

    return cluster(proactive_filter=ProactiveFilterConfig(action="truncate", time_limit_s=12.0, max_per_step=100), **more)


def test_whole_turns_of_a_truncated_group_are_trained_on():
    # Three turns of 10 s, cut at the first look after 12 s: one turn each. Then 1 s of training.
    report = run(truncating(), workload(10.0, turns=(3, 3), train=1.0))
    assert 12.0 <= report.step_s - 1.0 <= 12.0 + 2 * TICK_S
    assert set(report.groups) == {"admitted", "trained"}


@pytest.mark.parametrize("incomplete", ["drop", "allow_partial"])
def test_members_that_wait_for_a_place_when_they_are_truncated_are_lost(monkeypatch, incomplete):
    # Two places for two groups of two: the second group has not begun when it is cut, and each time it is issued anew.
    monkeypatch.setattr("psrl.simulation.simulation.MOST_EVENTS_PER_STEP", 100_000)
    small = truncating(places=2, max_groups_in_flight=2, incomplete_groups=incomplete, min_group_size=1)
    report = run(small, workload(10.0, turns=(3, 3), train=1.0))
    assert report.groups["dropped"] > 0 and report.episodes["given up"] >= 2 * report.groups["dropped"]


def test_turns_that_no_run_would_wait_for_are_counted():
    # 2 groups of 2 on 2 slots, 1 s a turn: half of the turns wait for 1 s and are answered after 2 s.
    def late(timeout_s):
        return run(replace(cluster(slots=2), request_timeout_s=timeout_s), workload(1.0, train=3.0), steps=20, warmup=0).late_turns

    assert (late(2.5), late(1.5)) == (0, 40)


def test_keys_that_a_sync_makes_an_instance_compute_again_lengthen_its_pause():
    # As in the test of the pause above, 5 s a step: 4 turns run at each sync, 0.25 s each. None where they end first.
    from psrl.config.asynchrony import PartialRolloutConfig

    for partial, step_s in (({}, 6.0), ({"interrupt_as_prompt": True}, 6.0), ({"enable": False}, 5.0)):
        settings = cluster(staleness=1, partial_rollout=PartialRolloutConfig(**partial))
        report = run(settings, workload(4.0, sync=1.0, pause=1.0, train=0.5, recompute_s=0.25))
        assert report.step_s == pytest.approx(step_s), partial


def test_a_run_in_which_no_episode_can_succeed_says_so(monkeypatch):
    monkeypatch.setattr("psrl.simulation.simulation.MOST_EVENTS_PER_STEP", 10_000)
    with pytest.raises(TooManyFailuresError, match="no update"):
        run(cluster(timeout_s=0.5), workload(1.0, train=1.0))


def test_ten_thousand_episodes_take_seconds():
    work = workload(LONG_TAIL, tool=0.1, turns=(1, 4), train=1.0, sync=0.2, pause=0.05)
    began = time.process_time()
    report = run(cluster(batch=32, slots=128, instances=4, places=1024, staleness=2, rollout_n=8), work, steps=35)
    assert sum(report.groups[fate] for fate in ("trained",)) * 8 > 10_000
    assert time.process_time() - began < 10.0


def test_the_simulator_looks_as_often_and_admits_as_much_as_the_driver():
    loops = Path(psrl.__file__).parent / "runtime" / "loops"  # read, not imported: it would bring ray
    assert f"TICK_S = {TICK_S}\n" in (loops / "tend.py").read_text()
    assert f"NUM_KEPT = {NUM_KEPT}\n" in (loops.parent / "actors" / "node_weights.py").read_text()
    assert "agent.num_workers * agent.max_concurrent_episodes // self._episodes_per_group" in (loops / "run.py").read_text()
    assert cluster(redundant_episodes=1).max_groups_in_flight == 1000 // 3
