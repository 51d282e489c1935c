"""A run that comes no further says what it waits for; one in which nothing is left that could end is ended."""

import asyncio

import pytest

from psrl.config.psrl_section import PsrlConfig
from psrl.errors import DeadlineError
from psrl.runtime.board import Board, Candidate
from psrl.runtime.loops.stall import StallLoop
from psrl.staleness import Coordinator, CoordinatorSettings, StalenessLedger
from psrl.types import Task

STALL_S = 0.1
LIMIT_S = 20.0


def board(*, groups: int = 1) -> Board:
    settings = CoordinatorSettings.of(PsrlConfig(), max_groups_in_flight=10, seed=1)
    meeting = Board(Coordinator(settings, StalenessLedger(staleness=0, groups_per_buffer=groups, version=0), num_instances=1))
    meeting.instance_is_up(0, 0)
    return meeting


def test_with_nothing_in_flight_the_run_ends_and_says_how_things_stand():
    told = []
    loop = StallLoop(board=board(), stall_s=STALL_S, progress=lambda: 0, tell=told.append)
    with pytest.raises(DeadlineError, match=r"stands still.*0 are in flight: none; instances 0: V0, 0 episodes"):
        asyncio.run(asyncio.wait_for(loop.run(), LIMIT_S))
    assert told, "it spoke before it ended"


def test_a_group_in_flight_is_named_and_left_to_its_own_deadline():
    async def run() -> list[str]:
        meeting, told = board(), []
        candidate = Candidate(task=Task(uid="train-0-7", prompt=(), data_source="test"))
        await meeting.admit(lambda: candidate, prompt_of=lambda task: "")
        loop = StallLoop(board=meeting, stall_s=STALL_S, progress=lambda: 0, tell=told.append)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(loop.run(), 10 * STALL_S)
        return told

    told = asyncio.run(run())
    assert "1 are in flight: train-0-7 (V0, instances [0]" in told[0]
    assert len(told) <= 4, "each report comes after twice as long"


def test_progress_keeps_it_silent():
    told, counts = [], iter(range(10**6))
    loop = StallLoop(board=board(), stall_s=STALL_S, progress=lambda: next(counts), tell=told.append)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(loop.run(), 10 * STALL_S))
    assert told == []
