"""Random schedules: the bound holds, nothing is lost or trained twice, and no order of events can stop a run."""

import itertools
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from staleness_world import POLICIES, ROUTERS, PlainWorld, World, WorldSettings

NUM_SCHEDULES = 500
NUM_SCHEDULES_SLOW = 10_000
QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}

worlds = st.builds(
    WorldSettings,
    staleness=st.integers(0, 3),
    groups_per_buffer=st.integers(1, 4),
    redundant_groups=st.integers(0, 2),
    num_steps=st.integers(1, 12),
    num_instances=st.integers(1, 3),
    max_groups_in_flight=st.sampled_from([100, 1, 3]),
    max_reissues=st.integers(0, 2),
    policy=st.sampled_from(POLICIES),
    router=st.sampled_from(ROUTERS),
    sticky=st.sampled_from(["group", "trajectory"]),
    action=st.sampled_from(["none", "retry", "truncate", "null"]),
)
schedules = st.builds(lambda seed, length: random.Random(seed).randbytes(length), st.integers(0, 2**32), st.integers(0, 1500))
"""Bytes of a seed, not of hypothesis, which likes small and equal ones; a failing schedule is made shorter from its end."""


def play_and_complete(world_settings: WorldSettings, schedule: bytes) -> World:
    world = World(world_settings, schedule)
    world.play()
    world.complete()
    assert len(world.trained) == world_settings.num_steps
    return world


@settings(max_examples=NUM_SCHEDULES, **QUIET)
@given(world_settings=worlds, schedule=schedules)
def test_every_schedule_keeps_the_bound_loses_nothing_and_can_always_go_on(world_settings, schedule):
    play_and_complete(world_settings, schedule)


@pytest.mark.slow
@settings(max_examples=NUM_SCHEDULES_SLOW, **QUIET)
@given(world_settings=worlds, schedule=schedules)
def test_ten_thousand_schedules_keep_the_bound_lose_nothing_and_can_always_go_on(world_settings, schedule):
    play_and_complete(world_settings, schedule)


def synchronous_loop(*, num_steps: int, batch_size: int, without_signal: frozenset) -> list[list[str]]:
    """Take the next tasks in order, play them, leave out those without signal, train: the groups of each update."""
    tasks = (f"g{number:04}" for number in itertools.count())
    return [list(itertools.islice((task for task in tasks if task not in without_signal), batch_size)) for _ in range(num_steps)]


@settings(max_examples=200, **QUIET)
@given(
    batch_size=st.integers(1, 4),
    num_steps=st.integers(1, 5),
    num_instances=st.integers(1, 3),
    policy=st.sampled_from(POLICIES),
    max_groups_in_flight=st.sampled_from([100, 1, 3]),
    without_signal=st.frozensets(st.integers(0, 30).map("g{:04}".format), max_size=10),
    schedule=schedules,
)
def test_with_bound_zero_every_schedule_trains_on_what_the_synchronous_loop_trains_on(
    batch_size, num_steps, num_instances, policy, max_groups_in_flight, without_signal, schedule
):
    chosen = WorldSettings(
        groups_per_buffer=batch_size,
        num_steps=num_steps,
        num_instances=num_instances,
        policy=policy,
        max_groups_in_flight=max_groups_in_flight,
    )
    world = PlainWorld(chosen, schedule, without_signal=without_signal)
    world.play()
    world.complete()
    assert world.trained == synchronous_loop(num_steps=num_steps, batch_size=batch_size, without_signal=without_signal)


def test_the_synchronous_loop_by_hand():
    expected = [["g0000", "g0002"], ["g0003", "g0004"]]
    assert synchronous_loop(num_steps=2, batch_size=2, without_signal=frozenset({"g0001"})) == expected
