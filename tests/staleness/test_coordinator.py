"""What the coordinator decides, by hand: one test for each rule."""

import pytest
from staleness_kit import admit, coordinator_of, sync, update

from psrl.config.asynchrony import ProactiveFilterConfig, RoutingConfig, SyncConfig
from psrl.config.psrl_section import PsrlConfig
from psrl.staleness import CoordinatorSettings, InstanceLoad, OverdueAction
from psrl.staleness.coordinator import MAX_ENDED_GROUPS

STARVATION = SyncConfig(policy="starvation")
EAGER = SyncConfig(policy="eager")


def test_settings_come_from_their_section():
    psrl = PsrlConfig(rollout_n=4, redundant_episodes=2, max_reissues=3)
    chosen = CoordinatorSettings.of(psrl, max_groups_in_flight=7, seed=5)
    assert (chosen.episodes_per_group, chosen.max_groups_in_flight, chosen.max_reissues, chosen.seed) == (6, 7, 3, 5)
    assert chosen.sync is psrl.sync and chosen.routing is psrl.routing and chosen.proactive_filter is psrl.proactive_filter


# -- admission


def test_the_synchronous_loop_falls_out_of_bound_zero():
    coordinator = coordinator_of(groups=2, instances=2, sync=STARVATION)
    assert admit(coordinator, "abc") == [(0, (0,)), (0, (1,)), None]
    coordinator.arrive("a"), coordinator.arrive("b")
    coordinator.consume()
    coordinator.advance()
    assert admit(coordinator, "c") == [None], "weights 0 make no data for update 1"
    assert coordinator.due_syncs() == [], "weights 1 are not published"
    coordinator.published(1)
    assert sync(coordinator) == [(0, 1), (1, 1)]
    assert admit(coordinator, "cd") == [(1, (0,)), (1, (1,))]


def test_no_more_groups_are_in_flight_than_may_be():
    coordinator = coordinator_of(groups=5, max_in_flight=2)
    assert admit(coordinator, "abc") == [(0, (0,)), (0, (0,)), None]
    coordinator.arrive("a")
    assert admit(coordinator, "c") == [(0, (0,))]


def test_nothing_is_given_to_an_instance_that_is_down_or_takes_weights():
    coordinator = coordinator_of(staleness=1, groups=4, instances=3)
    coordinator.instance_is_down(0)
    coordinator.sync_began(1)
    assert admit(coordinator, "a") == [(0, (2,))]
    coordinator.instance_is_down(2)
    assert admit(coordinator, "b") == [None]
    coordinator.sync_failed(1)
    assert admit(coordinator, "b") == [(0, (1,))]


def test_the_oldest_instance_of_a_group_that_is_spread_gives_its_version():
    routing = RoutingConfig(policy="round_robin", sticky="trajectory")
    coordinator = coordinator_of(staleness=1, groups=1, instances=2, episodes=3, routing=routing, sync=STARVATION)
    admit(coordinator, "a")
    coordinator.arrive("a")
    update(coordinator)
    coordinator.sync_began(1)
    coordinator.synced(1, 1)
    admission = coordinator.admit("b", now_s=0.0)
    assert (admission.version, admission.instances) == (0, (1, 0, 1))


def test_an_instance_that_is_due_to_take_weights_is_given_nothing_until_it_has():
    coordinator = coordinator_of(staleness=2, instances=1, sync=EAGER)
    admit(coordinator, "ab")
    coordinator.arrive("a")
    update(coordinator)
    assert admit(coordinator, "c") == [None]
    coordinator.sync_began(0)
    assert admit(coordinator, "c") == [None]
    coordinator.synced(0, 1)
    assert admit(coordinator, "c") == [(1, (0,))]


def test_the_first_that_took_weights_leaves_the_others_their_share():
    # 4 slots, 2 instances, both behind. Instance 0 is back first: it gets 2 groups, the other two wait for instance 1.
    coordinator = coordinator_of(groups=4, instances=2, episodes=8)
    for group in "abcd":
        admit(coordinator, group)
        coordinator.arrive(group)
    update(coordinator)
    for index in (0, 1):
        coordinator.sync_began(index)
    coordinator.synced(0, 1)
    assert admit(coordinator, "efg") == [(1, (0,) * 8), (1, (0,) * 8), None]
    coordinator.synced(1, 1)
    assert admit(coordinator, "ghi") == [(1, (1,) * 8), (1, (1,) * 8), None]


def test_the_share_of_a_dead_instance_is_for_the_others():
    coordinator = coordinator_of(groups=4, instances=2)
    coordinator.sync_began(1)
    assert admit(coordinator, "abc") == [(0, (0,)), (0, (0,)), None]
    coordinator.instance_is_down(1)
    assert admit(coordinator, "cd") == [(0, (0,)), (0, (0,))]


@pytest.mark.parametrize("num_instances", [2, 3, 5])
@pytest.mark.parametrize("num_slots", [1, 2, 7, 12])
def test_groups_are_spread_evenly_whoever_takes_weights_first(num_instances, num_slots):
    coordinator = coordinator_of(groups=num_slots, instances=num_instances, episodes=4)
    for index in range(num_instances):
        coordinator.sync_began(index)
    number = 0
    for index in reversed(range(num_instances)):
        coordinator.synced(index, 0)
        while coordinator.admit(f"g{number}", now_s=0.0) is not None:
            number += 1
    assert number == num_slots
    groups = [len(instance.groups) for instance in coordinator.instances]
    assert max(groups) - min(groups) <= 1


def test_one_slot_is_not_kept_for_an_instance_that_never_ends_its_sync():
    coordinator = coordinator_of(groups=1, instances=3)
    coordinator.sync_began(1), coordinator.sync_began(2)
    assert admit(coordinator, "a") == [(0, (0,))]


# -- syncs


def test_whatever_the_policy_an_instance_without_admissible_work_takes_weights():
    # Bound 1, 1 group a buffer: at version 1, weights 0 are good for buffer 1 only, and "b" of version 0 has it.
    coordinator = coordinator_of(staleness=1, sync=STARVATION)
    admit(coordinator, "ab")
    coordinator.arrive("a")
    update(coordinator)
    assert coordinator.ledger.room(0) == 0
    assert sync(coordinator) == [(0, 1)]
    assert admit(coordinator, "c") == [(1, (0,))]


def test_an_instance_with_admissible_work_keeps_its_weights_if_the_policy_says_so():
    coordinator = coordinator_of(staleness=2, groups=2, sync=STARVATION)
    admit(coordinator, "ab")
    coordinator.arrive("a"), coordinator.arrive("b")
    update(coordinator)
    assert sync(coordinator) == []
    assert admit(coordinator, "cdefg") == [(0, (0,))] * 4 + [None]
    # Weights 0 have used up buffers 1 and 2; weights 1 could work for buffer 3.
    assert sync(coordinator) == [(0, 1)]


def test_an_instance_that_is_busy_is_not_interrupted_for_weights_that_bring_no_work():
    # Two updates in all. Buffer 1 is promised to "b", so neither weights 0 nor weights 1 can start anything.
    coordinator = coordinator_of(staleness=1, sync=STARVATION, last=2)
    admit(coordinator, "ab")
    coordinator.arrive("a")
    update(coordinator)
    assert (coordinator.ledger.room(0), coordinator.ledger.room(1)) == (0, 0)
    assert coordinator.due_syncs() == []
    # Idle, it may as well have them.
    coordinator.arrive("b")
    assert sync(coordinator) == [(0, 1)]


def test_an_instance_that_comes_up_late_with_older_weights_takes_the_latest_before_it_gets_work():
    coordinator = coordinator_of(staleness=8, instances=2, sync=STARVATION)
    coordinator.instance_is_down(1)
    for group in "ab":
        admit(coordinator, group)
        coordinator.arrive(group)
        update(coordinator)
    coordinator.instance_is_up(1, 0)
    assert admit(coordinator, "cd") == [(0, (0,)), (0, (0,))]
    assert sync(coordinator) == [(1, 2)]
    assert admit(coordinator, "e") == [(2, (1,))]


def test_a_sync_that_failed_is_ordered_again_and_what_a_dead_instance_reports_is_passed_over():
    coordinator = coordinator_of()
    admit(coordinator, "a")
    coordinator.arrive("a")
    update(coordinator)
    coordinator.sync_began(0)
    assert coordinator.due_syncs() == []
    coordinator.sync_failed(0)
    assert [order.instance for order in coordinator.due_syncs()] == [0]
    coordinator.sync_began(0)
    coordinator.instance_is_down(0)
    coordinator.synced(0, 1)
    coordinator.observe(0, InstanceLoad(num_running=3))
    coordinator.instance_is_up(0, 0)
    coordinator.synced(0, 1)
    assert coordinator.instances[0].version == 0, "the process that took version 1 is not the one that serves now"
    assert coordinator.instances[0].load is None


# -- hold


def two_versions_on():
    """Bound 4, two instances; version 1 is held, version 2 is published; instance 1 still serves 0."""
    coordinator = coordinator_of(staleness=4, instances=2, sync=EAGER)
    admit(coordinator, "a")
    coordinator.arrive("a")
    update(coordinator)
    coordinator.hold(1)
    coordinator.sync_began(0)
    coordinator.synced(0, 1)
    return coordinator


def test_a_hold_brings_everybody_to_its_version_and_nobody_beyond():
    coordinator = two_versions_on()
    assert not coordinator.is_held_at(1)
    assert sync(coordinator) == [(1, 1)]
    assert coordinator.is_held_at(1) and coordinator.serving(1) == (0, 1)
    admit(coordinator, "b")
    coordinator.arrive("b")
    update(coordinator)
    assert sync(coordinator) == []
    assert admit(coordinator, "c") == [(1, (0,))], "generation goes on"
    assert coordinator.is_held_at(1)
    coordinator.release_hold()
    assert sync(coordinator) == [(0, 2), (1, 2)]


def test_an_instance_that_is_late_for_a_hold_is_brought_to_it_and_not_to_newer_weights():
    coordinator = two_versions_on()
    coordinator.sync_began(1)
    admit(coordinator, "b")
    coordinator.arrive("b")
    update(coordinator)
    coordinator.sync_failed(1)
    assert [(order.instance, order.version) for order in coordinator.due_syncs()] == [(1, 1)]


def test_the_policy_cannot_put_off_a_hold():
    coordinator = coordinator_of(staleness=4, sync=STARVATION)
    admit(coordinator, "a")
    coordinator.arrive("a")
    update(coordinator)
    assert coordinator.due_syncs() == []
    coordinator.hold(1)
    assert sync(coordinator) == [(0, 1)]


def test_a_hold_of_weights_that_are_to_come_changes_nothing_until_they_are_published():
    coordinator = coordinator_of(staleness=4, sync=STARVATION)
    for group in "ab":
        admit(coordinator, group)
        coordinator.arrive(group)
    update(coordinator)
    coordinator.consume()
    coordinator.hold(2)
    assert coordinator.due_syncs() == [] and not coordinator.is_held_at(2)
    coordinator.advance()
    coordinator.published(2)
    assert sync(coordinator) == [(0, 2)]
    assert coordinator.is_held_at(2)


def test_a_hold_does_not_wait_for_an_instance_that_died_or_came_up_beyond_it():
    coordinator = two_versions_on()
    coordinator.instance_is_down(1)
    assert coordinator.is_held_at(1)
    admit(coordinator, "b")
    coordinator.arrive("b")
    update(coordinator)
    coordinator.instance_is_up(1, 2)
    assert coordinator.is_held_at(1)
    assert coordinator.serving(1) == (0,)
    coordinator.instance_is_down(0)
    assert coordinator.is_held_at(1), "nothing but newer weights is left; waiting would not bring the old ones back"
    assert coordinator.serving(1) == ()
    coordinator.instance_is_down(1)
    assert not coordinator.is_held_at(1), "nobody can be asked"


def test_an_instance_that_comes_up_older_than_the_hold_takes_what_is_held():
    coordinator = two_versions_on()
    coordinator.instance_is_down(1)
    admit(coordinator, "b")
    coordinator.arrive("b")
    update(coordinator)
    coordinator.instance_is_up(1, 0)
    assert not coordinator.is_held_at(1)
    assert sync(coordinator) == [(1, 1)]
    assert coordinator.is_held_at(1)


def test_a_hold_with_a_full_ledger_ends_when_it_is_released():
    # Bound 0: version 0 is held, update 1 is published, so nothing at all can be admitted.
    coordinator = coordinator_of()
    coordinator.hold(0)
    admit(coordinator, "a")
    coordinator.arrive("a")
    update(coordinator)
    assert coordinator.is_held_at(0)
    assert (admit(coordinator, "b"), coordinator.due_syncs()) == ([None], [])
    coordinator.release_hold()
    assert sync(coordinator) == [(0, 1)]
    assert admit(coordinator, "b") == [(1, (0,))]


def test_what_cannot_be_held_is_a_mistake():
    coordinator = two_versions_on()
    with pytest.raises(AssertionError, match="held already"):
        coordinator.hold(1)
    coordinator.release_hold()
    with pytest.raises(AssertionError, match="cannot be held"):
        coordinator.hold(0)


# -- groups that end


def test_a_surplus_group_is_issued_again_as_another_attempt_so_often():
    coordinator = coordinator_of(redundant=1, max_reissues=2, groups=1)
    admit(coordinator, "ab")
    assert [coordinator.arrive("a"), coordinator.arrive("b")] == [0, None]
    assert not coordinator.is_in_flight("b")
    assert coordinator.reissue("b")
    update(coordinator)
    sync(coordinator)
    assert coordinator.admit("b", now_s=0.0).attempt == 1
    coordinator.release("b")
    assert coordinator.reissue("b")
    assert coordinator.admit("b", now_s=0.0).attempt == 2
    coordinator.release("b")
    assert not coordinator.reissue("b")
    assert coordinator.attempt_of("b") == 0, "it is given up, and nothing is kept of it"


def test_attempts_of_a_checkpoint_go_on():
    coordinator = coordinator_of(max_reissues=2)
    coordinator.remember_attempts({"a": 2, "b": 0})
    assert coordinator.admit("a", now_s=0.0).attempt == 2
    coordinator.release("a")
    assert not coordinator.reissue("a")
    assert coordinator.admit("b", now_s=0.0).attempt == 0


def test_nothing_is_kept_of_groups_that_were_trained_on_or_left_behind():
    coordinator = coordinator_of(groups=4, max_reissues=9)
    coordinator.remember_attempts({"a": 1})
    admit(coordinator, "a")
    coordinator.arrive("a")
    assert coordinator.attempt_of("a") == 0
    for number in range(MAX_ENDED_GROUPS + 1):
        coordinator.remember_attempts({f"g{number}": 1})
        admit(coordinator, [f"g{number}"])
        coordinator.release(f"g{number}")
    assert (coordinator.attempt_of("g0"), coordinator.attempt_of("g1")) == (0, 1)


def test_expired_groups_are_in_flight_no_more():
    coordinator = coordinator_of(redundant=1, episodes=4)
    admit(coordinator, "ab")
    coordinator.arrive("a")
    assert coordinator.consume().expired == ("b",)
    assert not coordinator.is_in_flight("b")
    assert coordinator.instances[0].num_episodes == 0
    with pytest.raises(KeyError):
        coordinator.arrive("b")


def test_a_group_on_a_dead_instance_stays_in_flight_and_is_named_without_it():
    coordinator = coordinator_of(groups=4, instances=2)
    admit(coordinator, "ab", now_s=5.0)
    coordinator.instance_is_down(1)
    coordinator.instance_is_up(1, 0)
    described = [(each.group, each.instances, each.version, each.age_s, each.attempt) for each in coordinator.outstanding(7.5)]
    assert described == [("a", (0,), 0, 2.5, 0), ("b", (), 0, 2.5, 0)]
    assert [each.num_episodes for each in coordinator.instances] == [1, 0]
    assert coordinator.arrive("b") == 0
    assert [each.num_episodes for each in coordinator.instances] == [1, 0]


def test_an_overdue_group_is_named_once_and_anew_when_it_is_issued_again():
    proactive = ProactiveFilterConfig(action="retry", time_limit_s=10.0, max_per_step=2)
    coordinator = coordinator_of(staleness=1, groups=4, proactive=proactive)
    admit(coordinator, "ab"), admit(coordinator, "cd", now_s=4.0)
    assert coordinator.overdue(10.0) == []
    assert [(each.group, each.action) for each in coordinator.overdue(12.0)] == [("a", OverdueAction.RETRY), ("b", OverdueAction.RETRY)]
    assert coordinator.overdue(20.0) == [], "two in this step; c and d wait for the next"
    coordinator.release("a")
    assert coordinator.reissue("a")
    assert coordinator.admit("a", now_s=20.0).attempt == 1
    for group in "abc":
        coordinator.arrive(group)
    admit(coordinator, "e", now_s=20.0)
    coordinator.arrive("e")
    update(coordinator)
    assert [each.group for each in coordinator.overdue(40.0)] == ["d"]


def test_a_retried_group_can_be_overdue_again():
    proactive = ProactiveFilterConfig(action="retry", time_limit_s=10.0, max_per_step=2)
    coordinator = coordinator_of(groups=4, proactive=proactive)
    admit(coordinator, "a")
    assert [each.group for each in coordinator.overdue(11.0)] == ["a"]
    coordinator.release("a"), coordinator.reissue("a")
    admit(coordinator, "a", now_s=11.0)
    assert [each.group for each in coordinator.overdue(22.0)] == ["a"]


# -- moves


def test_a_waiting_group_moves_to_an_instance_with_room_and_is_counted_there():
    coordinator = coordinator_of(groups=4, instances=2, episodes=2, routing=RoutingConfig(migrate=True))
    coordinator.instance_is_down(1)
    admit(coordinator, "abcd")
    coordinator.instance_is_up(1, 0)
    coordinator.observe(0, InstanceLoad(num_running=4, num_waiting=4))
    assert coordinator.due_moves() == [], "nothing is known of instance 1"
    coordinator.observe(1, InstanceLoad())
    moves = coordinator.due_moves()
    assert [(each.group, each.source, each.target) for each in moves] == [("d", 0, 1)]
    assert coordinator.due_moves() == moves
    coordinator.moved("d", 1)
    assert [(each.group, each.target) for each in coordinator.due_moves()] == [("c", 1)]
    coordinator.moved("c", 1)
    assert [each.num_episodes for each in coordinator.instances] == [4, 4]
    assert coordinator.due_moves() == [], "as many here as there, whatever the old reports say"
    coordinator.arrive("d")
    coordinator.moved("d", 0)
    assert [each.num_episodes for each in coordinator.instances] == [4, 2]


def test_a_group_never_moves_to_older_weights():
    coordinator = coordinator_of(staleness=1, groups=4, instances=2, routing=RoutingConfig(migrate=True), sync=STARVATION)
    for group in "abcd":
        admit(coordinator, group)
        coordinator.arrive(group)
    update(coordinator)
    coordinator.sync_began(0)
    coordinator.synced(0, 1)
    coordinator.instance_is_down(1)
    assert admit(coordinator, "ef") == [(1, (0,)), (1, (0,))]
    coordinator.published(1)
    coordinator.instance_is_up(1, 0)
    coordinator.observe(0, InstanceLoad(num_waiting=2))
    coordinator.observe(1, InstanceLoad())
    assert coordinator.due_moves() == []
    sync(coordinator)
    assert [(each.group, each.target) for each in coordinator.due_moves()] == [("f", 1)]


def test_without_migration_nothing_moves():
    coordinator = coordinator_of(groups=4, instances=2)
    admit(coordinator, "ab")
    coordinator.observe(0, InstanceLoad(num_waiting=9))
    coordinator.observe(1, InstanceLoad())
    assert coordinator.due_moves() == []
