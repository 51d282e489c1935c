"""Groups meet their update on the board: admitted while there is room, taken in the order of their uids."""

import asyncio

from psrl.data_plane import Partition
from psrl.data_plane.memory import meta_of
from psrl.runtime.board import Board
from psrl.runtime.groups import GroupResult
from psrl.staleness import StalenessLedger

SOON_S = 0.05


def result(group: str) -> GroupResult:
    return GroupResult(group=group, summaries=(), meta=meta_of([], Partition.TRAIN), records=())


def board(*, groups: int) -> Board:
    return Board(StalenessLedger(staleness=0, groups_per_buffer=groups, version=0))


def test_a_buffer_does_not_depend_on_who_arrived_first():
    async def run():
        meeting = board(groups=3)
        for group in ("a", "b", "c"):
            await meeting.admit(group)
        for group in ("c", "a", "b"):
            await meeting.arrive(result(group))
        ready = await asyncio.wait_for(meeting.take_ready(), 1)
        assert [taken.group for taken in ready.groups] == ["a", "b", "c"]

    asyncio.run(run())


def test_admission_waits_for_a_dropped_group():
    async def run():
        meeting = board(groups=1)
        await meeting.admit("a")
        waiting = asyncio.create_task(meeting.admit("b"))
        done, _ = await asyncio.wait({waiting}, timeout=SOON_S)
        assert not done
        await meeting.drop("a")
        assert await asyncio.wait_for(waiting, 1) == 0
        assert meeting.in_flight == ("b",)

    asyncio.run(run())


def test_with_staleness_zero_admission_waits_for_the_new_version():
    async def run():
        meeting = board(groups=1)
        await meeting.admit("a")
        await meeting.arrive(result("a"))
        await meeting.take_ready()
        waiting = asyncio.create_task(meeting.admit("b"))
        done, _ = await asyncio.wait({waiting}, timeout=SOON_S)
        assert not done
        await meeting.advance()
        assert await asyncio.wait_for(waiting, 1) == 1

    asyncio.run(run())
