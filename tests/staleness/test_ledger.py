"""The staleness bound holds for every schedule; with bound 0 training is exactly on-policy."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.staleness import StalenessLedger


def test_with_bound_zero_nothing_is_admitted_between_consume_and_advance():
    ledger = StalenessLedger(staleness=0, groups_per_buffer=2, version=0)
    assert [
        ledger.reserve("a", serving=ledger.version),
        ledger.reserve("b", serving=ledger.version),
        ledger.reserve("c", serving=ledger.version),
    ] == [0, 0, None]
    ledger.occupy("a")
    assert not ledger.is_ready()
    ledger.occupy("b")
    consumed = ledger.consume()
    assert (consumed.version, set(consumed.groups), consumed.max_version_gap) == (0, {"a", "b"}, 0)
    assert ledger.reserve("c", serving=ledger.version) is None
    assert ledger.advance() == 1
    assert ledger.reserve("c", serving=ledger.version) == 1


def test_a_released_slot_is_given_to_another_group():
    ledger = StalenessLedger(staleness=0, groups_per_buffer=1, version=4)
    ledger.reserve("a", serving=ledger.version)
    ledger.release("a")
    assert ledger.reserve("b", serving=ledger.version) == 4
    assert ledger.occupy("b") == 4


def test_reserve_takes_the_latest_buffer_and_occupy_the_earliest():
    ledger = StalenessLedger(staleness=2, groups_per_buffer=1, version=0)
    assert [ledger.reserve(g, serving=ledger.version) for g in "abc"] == [0, 0, 0]
    assert ledger.reserve("d", serving=ledger.version) is None
    # "a" was promised buffer 2; as the first to arrive it takes buffer 0.
    assert ledger.occupy("a") == 0


@settings(max_examples=300, deadline=None)
@given(
    staleness=st.integers(0, 3),
    capacity=st.integers(1, 4),
    choices=st.lists(st.tuples(st.sampled_from(["reserve", "occupy", "release", "update"]), st.integers(0, 1000)), max_size=120),
)
def test_no_schedule_breaks_the_bound_or_loses_a_group(staleness, capacity, choices):
    ledger = StalenessLedger(staleness=staleness, groups_per_buffer=capacity, version=0)
    in_flight, arrived, trained, admitted = [], set(), [], {}
    for number, (what, pick) in enumerate(choices):
        if what == "reserve":
            version = ledger.reserve(f"g{number}", serving=ledger.version)
            if version is not None:
                in_flight.append(f"g{number}")
                admitted[f"g{number}"] = version
        elif what == "update" and ledger.is_ready():
            consumed = ledger.consume()
            assert all(consumed.version - admitted[g] <= staleness for g in consumed.groups)
            assert len(consumed.groups) == capacity
            trained += consumed.groups
            arrived -= set(consumed.groups)
            ledger.advance()
        elif what in ("occupy", "release") and in_flight:
            group = in_flight.pop(pick % len(in_flight))
            if what == "release":
                ledger.release(group)
            else:
                buffer = ledger.occupy(group)
                assert 0 <= buffer - admitted[group] <= staleness
                arrived.add(group)
        assert len(in_flight) + len(arrived) <= capacity * (staleness + 1)
        assert set(ledger.in_flight) == set(in_flight)
    assert len(trained) == len(set(trained))
    # No deadlock: letting everything arrive and refilling always makes the current buffer ready.
    for group in in_flight:
        ledger.occupy(group)
    number = 0
    while not ledger.is_ready():
        version = ledger.reserve(f"refill{number}", serving=ledger.version)
        assert version is not None, "neither ready nor able to admit"
        ledger.occupy(f"refill{number}")
        number += 1


def test_consuming_a_buffer_that_is_not_ready_is_a_mistake():
    with pytest.raises(AssertionError, match="not ready"):
        StalenessLedger(staleness=0, groups_per_buffer=1, version=0).consume()
