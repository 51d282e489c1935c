"""Random schedules: the bound holds, nothing is lost or trained twice, and no order of events can stop a run."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from staleness_world import POLICIES, ROUTERS, World, WorldSettings

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
