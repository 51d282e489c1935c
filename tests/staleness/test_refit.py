"""Arrived groups of a checkpoint under other settings: what is kept keeps the bound, and as much is kept as can be."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from psrl.staleness import StalenessLedger
from psrl.staleness.ledger import LedgerSnapshot
from psrl.staleness.refit import refit


def snapshot(version, occupied, in_flight=()):
    return LedgerSnapshot(version=version, occupied=occupied, in_flight=tuple(in_flight))


def test_what_fits_stays_where_it_is():
    before = snapshot(5, {5: {"a": 4, "b": 5}, 6: {"c": 5}}, ["d"])
    assert refit(before, staleness=2, groups_per_buffer=2, last_version=10) == (before, ())


def test_with_less_staleness_the_too_old_come_back_and_the_others_move_up():
    before = snapshot(5, {5: {"a": 3}, 6: {"b": 5}}, ["c"])
    assert refit(before, staleness=0, groups_per_buffer=1, last_version=10) == (snapshot(5, {5: {"b": 5}}, ["c"]), ("a",))


def test_a_run_that_is_to_end_earlier_keeps_what_its_last_update_takes():
    before = snapshot(5, {5: {"a": 5}, 6: {"b": 5}, 7: {"c": 5}})
    # The update 5 -> 6 is the last one: it has room for two.
    after, without = refit(before, staleness=2, groups_per_buffer=2, last_version=6)
    assert (after.occupied, without) == ({5: {"a": 5, "b": 5}}, ("c",))


def test_a_run_that_has_ended_keeps_none():
    before = snapshot(5, {5: {"a": 5}})
    assert refit(before, staleness=2, groups_per_buffer=2, last_version=5) == (snapshot(5, {}), ("a",))


def most_that_fit(admitted, *, version, staleness, groups_per_buffer, last_version):
    """By trying every assignment: as slow as it is plain."""
    buffers = [v for v in range(version, last_version) for _ in range(groups_per_buffer)]
    choices = [[None, *(i for i, v in enumerate(buffers) if v - each <= staleness)] for each in admitted]
    assignments = ([i for i in picked if i is not None] for picked in itertools.product(*choices))
    return max((len(used) for used in assignments if len(set(used)) == len(used)), default=0)


@given(
    ages=st.lists(st.integers(0, 2), max_size=5),
    staleness=st.integers(0, 2),
    groups_per_buffer=st.integers(1, 2),
    num_updates_left=st.integers(0, 3),
)
def test_no_other_placement_keeps_more_and_the_ledger_takes_it(ages, staleness, groups_per_buffer, num_updates_left):
    version, last = 5, 5 + num_updates_left
    # Three to a buffer, whatever the settings allow: a checkpoint of a run with another staleness.
    arrived = {f"g{index}": version - age for index, age in enumerate(ages)}
    occupied = {}
    for index, (group, admitted) in enumerate(arrived.items()):
        occupied.setdefault(version + index // 3, {})[group] = admitted
    after, without = refit(snapshot(version, occupied), staleness=staleness, groups_per_buffer=groups_per_buffer, last_version=last)
    placed = {group: admitted for groups in after.occupied.values() for group, admitted in groups.items()}
    assert placed | {group: arrived[group] for group in without} == arrived
    assert len(placed) == most_that_fit(
        list(arrived.values()), version=version, staleness=staleness, groups_per_buffer=groups_per_buffer, last_version=last
    )
    restored = StalenessLedger.restore(after, staleness=staleness, groups_per_buffer=groups_per_buffer, last_version=last)
    assert restored.num_arrived == len(placed)
