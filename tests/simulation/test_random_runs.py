"""Any settings, any latencies, any failures: updates come, nothing is lost, nothing is too old."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation_kit import cluster, workload

from psrl.config.asynchrony import PartialRolloutConfig, ProactiveFilterConfig, RoutingConfig, SyncConfig
from psrl.simulation import Failures, simulate
from psrl.staleness.routing import routers
from psrl.staleness.sync_policy import sync_policies

NUM_STEPS = 25
TURNS = ("0.5", "lognormal:median=0.5,sigma=1,max=20", "pareto:min=0.1,alpha=1.1,max=30")


@st.composite
def clusters(draw):
    partial = draw(st.sampled_from([(True, False), (True, True), (False, False)]))
    action = draw(st.sampled_from(["none", "retry", "truncate", "null"]))
    return cluster(
        batch=draw(st.integers(1, 5)),
        slots=draw(st.integers(1, 8)),
        instances=draw(st.integers(1, 4)),
        workers=draw(st.integers(1, 3)),
        places=draw(st.integers(1, 40)),
        timeout_s=draw(st.sampled_from([60.0, 1e9])),
        drops_equal=draw(st.booleans()),
        seed=draw(st.integers(0, 5)),
        rollout_n=draw(st.integers(1, 4)),
        staleness=draw(st.integers(0, 4)),
        redundant_episodes=draw(st.integers(0, 2)),
        redundant_groups=draw(st.integers(0, 3)),
        max_reissues=draw(st.integers(0, 2)),
        max_groups_in_flight=draw(st.integers(0, 6)),
        partial_rollout=PartialRolloutConfig(enable=partial[0], interrupt_as_prompt=partial[1]),
        sync=SyncConfig(policy=draw(st.sampled_from(sorted(sync_policies.names)))),
        routing=RoutingConfig(
            policy=draw(st.sampled_from(sorted(routers.names))),
            sticky=draw(st.sampled_from(["group", "trajectory"])),
            migrate=draw(st.booleans()),
        ),
        proactive_filter=ProactiveFilterConfig(action=action, time_limit_s=draw(st.sampled_from([3.0, 30.0])), max_per_step=2),
    )


@st.composite
def workloads(draw):
    return workload(
        draw(st.sampled_from(TURNS)),
        tool=draw(st.sampled_from([0.0, 0.3])),
        turns=(1, draw(st.integers(1, 3))),
        train=draw(st.sampled_from([0.0, 0.5, 5.0])),
        push=draw(st.sampled_from([0.0, 0.2])),
        sync=draw(st.sampled_from([0.0, 1.0])),
        pause=draw(st.sampled_from([0.0, 0.5])),
        equal_share=draw(st.sampled_from([0.0, 0.3])),
        failures=Failures(
            replica_per_s=draw(st.sampled_from([0.0, 0.02])),
            worker_per_s=draw(st.sampled_from([0.0, 0.02])),
            episode_share=draw(st.sampled_from([0.0, 0.1])),
            restart_s=2.0,
        ),
    )


def check_a_run(cluster_, workload_):
    report = simulate(cluster_, workload_, num_steps=NUM_STEPS, num_warmup=0)
    groups, episodes = report.groups, report.episodes
    num_left = sum(count for fate, count in groups.items() if fate != "admitted")
    assert groups["admitted"] == num_left + report.groups_in_flight + report.groups_waiting
    # The last buffer may be taken already when its predecessor is counted.
    assert groups["trained"] - NUM_STEPS * cluster_.groups_per_buffer in (0, cluster_.groups_per_buffer)
    assert max(report.staleness_shares) <= cluster_.psrl.staleness
    ended = sum(episodes.get(end, 0) for end in ("judged", "cancelled", "given up", "in flight"))
    assert episodes["issued"] == ended
    assert report.engines_busy <= 1.0 + 1e-9
    assert report.trainer_training + report.trainer_pushing <= 1.0 + 1e-9


@settings(max_examples=12, deadline=None)
@given(clusters(), workloads())
def test_updates_come_and_everything_is_accounted_for(cluster_, workload_):
    check_a_run(cluster_, workload_)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(clusters(), workloads())
def test_updates_come_in_many_more_runs(cluster_, workload_):
    check_a_run(cluster_, workload_)
