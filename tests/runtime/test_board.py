"""Groups meet their update on the board: admitted while there is room, taken in the order of their uids, ended when not wanted."""

import asyncio
import time

import pytest

from psrl.config.psrl_section import PsrlConfig
from psrl.data_plane.memory import meta_of
from psrl.runtime.board import SURPLUS, Board, Candidate, Unwanted
from psrl.runtime.groups import GroupResult
from psrl.staleness import Coordinator, CoordinatorSettings, StalenessLedger
from psrl.telemetry.group_log import Fate
from psrl.types import Task

SOON_S = 0.05
LIMIT_S = 5.0
TOO_LONG = Unwanted(fate=Fate.NULL, may_come_again=True)


def result(group: str, oldest: int = 0) -> GroupResult:
    return GroupResult(group=group, summaries=(), meta=meta_of([]), records=(), oldest_version=oldest)


def board(*, groups: int, staleness: int = 0, redundant: int = 0, settings: PsrlConfig | None = None, clock=time.monotonic) -> Board:
    ledger = StalenessLedger(staleness=staleness, groups_per_buffer=groups, version=0, redundant_groups=redundant)
    chosen = CoordinatorSettings.of(settings or PsrlConfig(), max_groups_in_flight=100, seed=1)
    meeting = Board(Coordinator(chosen, ledger, num_instances=1), clock=clock)
    meeting.instance_is_up(0, 0)
    return meeting


def admit(meeting: Board, name: str):
    candidate = Candidate(task=Task(uid=name, prompt=(), data_source="test"))
    return meeting.admit(lambda: candidate, prompt_of=lambda task: "")


async def in_time(awaitable):
    return await asyncio.wait_for(awaitable, LIMIT_S)


async def fast_before_slow() -> Board:
    """A buffer of one group, for which two were admitted and one has arrived."""
    meeting = board(groups=1, redundant=1)
    await in_time(admit(meeting, "fast"))
    await in_time(admit(meeting, "slow"))
    meeting.arrive(result("fast"))
    return meeting


async def synced(meeting: Board) -> None:
    """The update is made and the replica takes it."""
    meeting.published(meeting.advance())
    (order,) = await in_time(meeting.next_syncs())
    meeting.sync_began(order.instance)
    meeting.synced(order.instance, order.version)


async def waits(task: asyncio.Task) -> bool:
    done, _ = await asyncio.wait({task}, timeout=SOON_S)
    return not done


def test_a_buffer_does_not_depend_on_who_arrived_first():
    async def run():
        meeting = board(groups=3)
        for group in ("a", "b", "c"):
            await in_time(admit(meeting, group))
        for group in ("c", "a", "b"):
            assert meeting.arrive(result(group))
        ready = await in_time(meeting.take_ready())
        assert [taken.group for taken in ready.groups] == ["a", "b", "c"]

    asyncio.run(run())


def test_admission_waits_for_a_group_that_is_left_out():
    async def run():
        meeting = board(groups=1)
        await in_time(admit(meeting, "a"))
        waiting = asyncio.create_task(admit(meeting, "b"))
        assert await waits(waiting)
        assert not meeting.leave("a", may_come_again=False)
        _, admission = await in_time(waiting)
        assert admission.version == 0
        assert [candidate.group for candidate in meeting.in_flight] == ["b"]

    asyncio.run(run())


def test_with_staleness_zero_admission_waits_until_the_replica_has_the_new_weights():
    async def run():
        meeting = board(groups=1)
        await in_time(admit(meeting, "a"))
        meeting.arrive(result("a"))
        await in_time(meeting.take_ready())
        waiting = asyncio.create_task(admit(meeting, "b"))
        assert await waits(waiting)
        meeting.published(meeting.advance())
        assert await waits(waiting)
        (order,) = await in_time(meeting.next_syncs())
        meeting.sync_began(order.instance)
        assert await waits(waiting)
        meeting.synced(order.instance, order.version)
        _, admission = await in_time(waiting)
        assert admission.version == 1

    asyncio.run(run())


def test_redundant_groups_that_come_too_late_are_ended_and_issued_again_once():
    async def run():
        meeting = await fast_before_slow()
        ready = await in_time(meeting.take_ready())
        assert [taken.group for taken in ready.groups] == ["fast"]
        assert await in_time(meeting.next_to_end()) == "slow"
        assert meeting.unwanted("slow") == SURPLUS
        assert meeting.leave("slow", may_come_again=True)
        await synced(meeting)
        # What is issued again comes before the new task.
        again, admission = await in_time(admit(meeting, "new"))
        assert (again.group, admission.attempt) == ("slow", 1)
        meeting.give_up("slow", TOO_LONG)
        assert not meeting.leave("slow", may_come_again=True)

    asyncio.run(run())


def test_a_hold_brings_the_replica_to_its_version_and_keeps_it_there():
    async def run():
        meeting = board(groups=1, staleness=1)
        meeting.hold(0)
        await in_time(meeting.until_held(0))
        await in_time(admit(meeting, "a"))
        meeting.arrive(result("a"))
        await in_time(meeting.take_ready())
        meeting.published(meeting.advance())
        syncs = asyncio.create_task(meeting.next_syncs())
        assert await waits(syncs)
        meeting.release_hold()
        assert [order.version for order in await in_time(syncs)] == [1]

    asyncio.run(run())


@pytest.mark.parametrize("action", ["retry", "null"])
def test_a_group_in_flight_too_long_is_named_once_and_its_slot_is_free_when_it_is_given_up(action):
    async def run():
        now = [0.0]
        settings = PsrlConfig()
        settings.proactive_filter.action = action
        settings.proactive_filter.time_limit_s = 10.0
        meeting = board(groups=1, settings=settings, clock=lambda: now[0])
        await in_time(admit(meeting, "a"))
        assert meeting.overdue() == []
        now[0] = 11.0
        assert [each.group for each in meeting.overdue()] == ["a"]
        assert meeting.overdue() == []
        meeting.give_up("a", TOO_LONG)
        _, admission = await in_time(admit(meeting, "b"))
        assert admission.group == "b"

    asyncio.run(run())


def test_a_group_that_ends_by_itself_before_it_is_told_to_is_not_named_to_end_any_more():
    async def run():
        meeting = await fast_before_slow()
        await in_time(meeting.take_ready())
        assert meeting.leave("slow", may_come_again=True)
        ending = asyncio.create_task(meeting.next_to_end())
        assert await waits(ending), "the word would reach the next attempt"
        ending.cancel()

    asyncio.run(run())


def test_a_group_is_not_issued_again_while_somebody_tells_its_worker_to_end_it():
    async def run():
        meeting = await fast_before_slow()
        await in_time(meeting.take_ready())
        with meeting.being_ended(await in_time(meeting.next_to_end())):
            assert meeting.leave("slow", may_come_again=True)
            await synced(meeting)
            first, _ = await in_time(admit(meeting, "new"))
            assert first.group == "new"
        second, admission = await in_time(admit(meeting, "newer"))
        assert (second.group, admission.attempt) == ("slow", 1)

    asyncio.run(run())
