"""Slots, deadlines and redundancy, by hand and against a ledger that tries every assignment."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_ledger import SlowLedger

from psrl.staleness import BufferState, LedgerSnapshot, StalenessLedger


def ledger_of(*, staleness=0, groups=1, redundant=0, version=0, last=None) -> StalenessLedger:
    return StalenessLedger(staleness=staleness, groups_per_buffer=groups, version=version, redundant_groups=redundant, last_version=last)


def admit(ledger: StalenessLedger, names, *, serving=None) -> list:
    return [ledger.reserve(name, serving=ledger.version if serving is None else serving) for name in names]


def update(ledger: StalenessLedger) -> tuple:
    consumed = ledger.consume()
    ledger.advance()
    return consumed.groups, consumed.expired


def test_with_bound_zero_nothing_is_admitted_between_consume_and_advance():
    ledger = ledger_of(groups=2)
    assert admit(ledger, "abc") == [0, 0, None]
    ledger.occupy("a")
    assert not ledger.is_ready()
    ledger.occupy("b")
    consumed = ledger.consume()
    assert (consumed.version, set(consumed.groups), consumed.max_version_gap) == (0, {"a", "b"}, 0)
    assert admit(ledger, "c", serving=0) == [None]
    assert ledger.advance() == 1
    assert admit(ledger, "c", serving=0) == [None], "weights of version 0 make no data for update 1"
    assert admit(ledger, "c", serving=1) == [1]


def test_weights_that_are_served_before_the_driver_counted_the_update_admit():
    ledger = ledger_of()
    admit(ledger, "a")
    ledger.occupy("a")
    ledger.consume()
    # Buffer 1 is open only after advance.
    assert ledger.room(1) == 0
    ledger.advance()
    assert ledger.room(1) == 1
    with pytest.raises(AssertionError, match="before the update"):
        ledger.reserve("b", serving=2)


def test_a_released_slot_is_given_to_another_group():
    ledger = ledger_of(version=4)
    admit(ledger, "a")
    ledger.release("a")
    assert admit(ledger, "b") == [4]
    assert ledger.occupy("b") == 4


def test_reserve_takes_the_latest_buffer_and_occupy_the_earliest():
    ledger = ledger_of(staleness=2)
    assert admit(ledger, "abcd") == [0, 0, 0, None]
    assert ledger.occupy("a") == 0
    assert ledger.occupy("b") == 1
    assert ledger.occupy("c") == 2


def test_older_weights_reach_fewer_buffers():
    # Version 1, bound 1: weights 0 make data for buffer 1 only, weights 1 for buffers 1 and 2.
    ledger = ledger_of(staleness=1)
    admit(ledger, "x")
    ledger.occupy("x")
    update(ledger)
    assert (ledger.room(0), ledger.room(1)) == (1, 2)
    assert admit(ledger, "ab", serving=0) == [0, None]
    assert admit(ledger, "bc", serving=1) == [1, None]


def test_a_slot_that_a_late_group_depends_on_is_left_to_it():
    # Bound 1. "a" and "b" of version 0 have deadline 1; "b" makes update 0. "c" of version 1 arrives before "a": buffer 1 is the only
    # one for "a", so "c" takes buffer 2.
    ledger = ledger_of(staleness=1)
    admit(ledger, "ab")
    assert ledger.occupy("b") == 0
    assert update(ledger) == (("b",), ())
    assert admit(ledger, "c") == [1]
    assert ledger.occupy("c") == 2
    assert ledger.state_of(1) is BufferState.STUCK
    assert ledger.occupy("a") == 1


def test_an_earlier_slot_is_taken_where_its_holder_can_wait_for_a_later_one():
    # Bound 1. "a" of version 0 has deadline 1, "b" and "c" of version 1 have 2; buffers 1 and 2 have 2 slots each. "b" arrives first:
    # "a" and "c" still fit, one in each.
    ledger = ledger_of(staleness=1, groups=2)
    admit(ledger, "xya")
    ledger.occupy("x"), ledger.occupy("y")
    update(ledger)
    admit(ledger, "bc")
    assert ledger.occupy("b") == 1


def test_states_of_a_buffer():
    # Bound 1, 2 groups: buffers 0 and 1. Groups in flight count for the latest buffer first.
    ledger = ledger_of(staleness=1, groups=2)
    states = lambda: (ledger.state_of(0), ledger.state_of(1))  # noqa: E731
    assert states() == (BufferState.PENDING, BufferState.PENDING)
    admit(ledger, "ab")
    assert states() == (BufferState.PENDING, BufferState.STUCK)
    admit(ledger, "cd")
    assert states() == (BufferState.STUCK, BufferState.STUCK)
    ledger.occupy("a"), ledger.occupy("b")
    assert states() == (BufferState.READY, BufferState.STUCK)
    ledger.release("c")
    assert states() == (BufferState.READY, BufferState.PENDING)


def test_the_first_of_redundant_groups_make_the_update_and_the_last_is_surplus():
    ledger = ledger_of(groups=2, redundant=1)
    assert admit(ledger, "abcd") == [0, 0, 0, None]
    assert [ledger.occupy("a"), ledger.state_of(0)] == [0, BufferState.STUCK]
    assert [ledger.occupy("c"), ledger.state_of(0)] == [0, BufferState.READY_WITH_CAPACITY]
    assert [ledger.occupy("b"), ledger.state_of(0)] == [None, BufferState.READY]
    assert update(ledger) == (("a", "c"), ())


def test_redundant_groups_that_no_later_buffer_admits_expire():
    ledger = ledger_of(groups=2, redundant=1)
    admit(ledger, "abc")
    ledger.occupy("a"), ledger.occupy("c")
    assert update(ledger) == (("a", "c"), ("b",))
    assert ledger.in_flight == ()


def test_redundant_groups_move_to_later_buffers_with_room_and_the_last_admitted_expire():
    # Bound 1, 1 group and 1 redundant one: 2 slots in each of buffers 0 and 1, all promised to groups of deadline 1. "a" makes update
    # 0; of the other three, buffer 1 takes two.
    ledger = ledger_of(staleness=1, redundant=1)
    assert admit(ledger, "abcde") == [0, 0, 0, 0, None]
    assert ledger.occupy("a") == 0
    assert update(ledger) == (("a",), ("d",))
    assert ledger.in_flight == ("b", "c")
    # As in the step before, one of the two is in vain: they are redundant to each other.
    assert [ledger.occupy("c"), ledger.occupy("b")] == [1, None]


def test_the_oldest_expire_before_newer_ones():
    # Bound 2, 1 + 1 groups: "a" to "f" of version 0 fill the 6 slots of buffers 0 to 2. "a" arrives; 5 groups, 4 slots are left after
    # update 0, so "f" expires. At version 1, "g" gets one of 2 slots of buffer 3. "b" arrives: 3 groups of deadline 2 and "g" of
    # deadline 3, and after update 1 the slots are 2 of buffer 2 and 2 of buffer 3: "e" expires, the last of the oldest, and not "g".
    ledger = ledger_of(staleness=2, redundant=1)
    admit(ledger, "abcdef")
    ledger.occupy("a")
    assert update(ledger) == (("a",), ("f",))
    assert admit(ledger, "g") == [1]
    assert ledger.occupy("b") == 1
    assert update(ledger) == (("b",), ("e",))
    assert ledger.in_flight == ("c", "d", "g")


def test_a_full_buffer_promises_nothing_more():
    ledger = ledger_of(groups=2, redundant=1)
    admit(ledger, "abc")
    ledger.occupy("a"), ledger.occupy("b")
    ledger.release("c")
    assert admit(ledger, "d") == [None], "what it is admitted for has all that it needs"


def test_a_redundant_group_takes_a_slot_that_becomes_free():
    # Bound 1, 1 + 1 groups. "a" makes buffer 0 full; "b", "c", "d" have the 2 slots of buffer 1, so one is redundant. "b" fails: the
    # other two have a slot each, and none is redundant any more.
    ledger = ledger_of(staleness=1, redundant=1)
    admit(ledger, "abcd")
    ledger.occupy("a")
    assert ledger.state_of(0) is BufferState.READY_WITH_CAPACITY
    ledger.release("b")
    assert ledger.state_of(0) is BufferState.READY
    assert ledger.room(0) == 0
    assert update(ledger) == (("a",), ())


def test_a_buffer_that_opens_makes_a_redundant_group_useful_again():
    # Bound 1, 1 + 1 groups. After update 0 was consumed weights 1 are served already: "g" gets the second slot of buffer 1, as buffer 2
    # is not open. "b" makes buffer 1 full, so "g" is redundant, until buffer 2 opens.
    ledger = ledger_of(staleness=1, redundant=1)
    admit(ledger, "ab")
    ledger.occupy("a")
    ledger.consume()
    assert admit(ledger, "gh", serving=1) == [1, None]
    assert [ledger.occupy("b"), ledger.state_of(1)] == [1, BufferState.READY_WITH_CAPACITY]
    ledger.advance()
    assert ledger.state_of(1) is BufferState.READY
    assert (update(ledger), ledger.occupy("g")) == ((("b",), ()), 2)


def test_a_group_does_not_push_two_others_out_because_one_was_redundant_once():
    # Bound 2, 1 + 1 groups, all of version 0 and deadline 2. "x" makes update 0, "y" is in buffer 1, and of "z", "h", "i" one is
    # redundant (buffer 2 has 2 slots). "z" fails: "h" and "i" have the slots of buffer 2, none is redundant. "g" of version 1 arrives:
    # in buffer 2 it would make both useless, so it takes buffer 3.
    ledger = ledger_of(staleness=2, redundant=1)
    admit(ledger, "xyzhi")
    ledger.occupy("x")
    update(ledger)
    assert ledger.occupy("y") == 1
    ledger.release("z")
    admit(ledger, "g")
    assert ledger.occupy("g") == 3
    assert [ledger.occupy("h"), ledger.occupy("i")] == [2, None]


def test_tokens_older_than_promised_count():
    ledger = ledger_of(staleness=1, groups=2)
    admit(ledger, "ab")
    ledger.occupy("a"), ledger.occupy("b")
    update(ledger)
    admit(ledger, "cdef", serving=1)
    # Of version 0, deadline 1, although promised 2.
    assert ledger.occupy("c", oldest=0) == 1
    assert ledger.occupy("d", oldest=1) == 1
    assert ledger.occupy("e", oldest=0) is None, "buffer 1 is full, and buffer 2 is too late"
    assert ledger.occupy("f", oldest=5) == 2, "newer tokens change nothing"
    consumed = ledger.consume()
    assert (dict(consumed.admitted), consumed.max_version_gap) == ({"c": 0, "d": 1}, 1)


def test_a_run_admits_no_more_than_it_trains_on():
    ledger = ledger_of(staleness=2, last=2)
    assert admit(ledger, "abc") == [0, 0, None]
    for group in "ab":
        ledger.occupy(group)
        update(ledger)
    assert (ledger.version, ledger.room(2), ledger.is_ready()) == (2, 0, False)


def test_consuming_a_buffer_that_is_not_ready_is_a_mistake():
    with pytest.raises(AssertionError, match="not ready"):
        ledger_of().consume()


def test_a_snapshot_goes_through_json_and_counts_a_consumed_update_as_made():
    ledger = ledger_of(staleness=1, groups=2)
    admit(ledger, "abcd")
    for group in "acd":
        ledger.occupy(group)
    ledger.consume()
    snapshot = LedgerSnapshot.of(json.loads(json.dumps(ledger.snapshot().as_dict())))
    assert snapshot == LedgerSnapshot(version=1, occupied={1: {"d": 0}}, in_flight=("b",))
    restored = StalenessLedger.restore(snapshot, staleness=1, groups_per_buffer=2)
    assert (restored.version, restored.num_arrived, restored.in_flight) == (1, 1, ())
    # Everything that was in flight can be issued again: buffer 1 has one slot left, buffer 2 two.
    assert admit(restored, "befg") == [1, 1, 1, None]
    assert [restored.occupy("e"), update(restored)[0]] == [1, ("d", "e")]


def test_a_snapshot_that_the_settings_do_not_admit_is_not_restored():
    snapshot = LedgerSnapshot(version=3, occupied={4: {"a": 2}}, in_flight=())
    with pytest.raises(AssertionError, match="too old for buffer 4"):
        StalenessLedger.restore(snapshot, staleness=1, groups_per_buffer=1)
    with pytest.raises(AssertionError, match="never made"):
        StalenessLedger.restore(snapshot, staleness=2, groups_per_buffer=1, last_version=4)


STEPS = ["reserve", "reserve old", "occupy", "occupy", "occupy old", "release", "update", "update"]


@settings(max_examples=300, deadline=None)
@given(
    staleness=st.integers(0, 3),
    groups=st.integers(1, 3),
    redundant=st.integers(0, 2),
    choices=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 1000)), max_size=80),
)
def test_the_ledger_answers_as_one_that_tries_every_assignment(staleness, groups, redundant, choices):
    bounds = {"staleness": staleness, "groups_per_buffer": groups, "version": 0, "redundant_groups": redundant, "last_version": 9}
    fast, slow = StalenessLedger(**bounds), SlowLedger(**bounds)
    for number, (what, pick) in enumerate(choices):
        if what.startswith("reserve"):
            serving = fast.version - (pick % (staleness + 2) if what == "reserve old" else 0) + (pick % 2) * slow.is_consumed
            if serving >= 0:
                assert fast.reserve(f"g{number}", serving=serving) == slow.reserve(f"g{number}", serving=serving)
        elif what == "update" and slow.is_consumed:
            fast.advance(), slow.advance()
        elif what == "update" and slow.is_ready():
            assert fast.is_ready()
            consumed = fast.consume()
            assert (list(consumed.groups), list(consumed.expired)) == slow.consume()
            assert len(consumed.expired) <= redundant
        elif what != "update" and fast.in_flight:
            group = fast.in_flight[pick % len(fast.in_flight)]
            if what == "release":
                fast.release(group), slow.release(group)
            else:
                oldest = max(0, fast.admitted_version(group) - pick % 3) if what == "occupy old" else None
                assert fast.occupy(group, oldest=oldest) == slow.occupy(group, oldest=oldest)
        assert fast.in_flight == tuple(slow.in_flight) and slow.fits()
        assert fast.is_ready() == slow.is_ready()
        for version, arrived in slow.occupied.items():
            is_with_capacity = fast.state_of(version) is BufferState.READY_WITH_CAPACITY
            assert is_with_capacity == (len(arrived) == groups and slow.redundant[version] > 0)
