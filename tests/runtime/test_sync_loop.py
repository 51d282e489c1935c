"""Replicas take weights when they are told to; one that cannot is asked again, not at once and not for ever."""

import asyncio

import pytest

from psrl.config.asynchrony import PartialRolloutConfig
from psrl.config.psrl_section import PsrlConfig
from psrl.errors import EngineError, WeightSyncError
from psrl.protocols import WeightReport
from psrl.runtime.actors.engine_replica import SyncResult
from psrl.runtime.board import Board
from psrl.runtime.loops.sync import MAX_FAILURES, SyncLoop
from psrl.staleness import Coordinator, CoordinatorSettings, StalenessLedger

LIMIT_S = 10.0
PAUSE_S = 0.02


class Instances:
    """What a sync comes to is written down: a real replica cannot be made to fail in just this way."""

    num_instances = 1

    def __init__(self, *outcomes: Exception | None) -> None:
        self.outcomes = list(outcomes)
        self.asked_at: list[float] = []

    async def sync(self, instance: int, version: int, mode: str) -> SyncResult:
        self.asked_at.append(asyncio.get_running_loop().time())
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if outcome is not None:
            raise outcome
        report = WeightReport(version=version, num_matched=1, num_expected=1, checksum="c")
        return SyncResult(report=report, seconds=0.1, paused_s=0.01)


def board_behind() -> Board:
    """One instance that serves version 0 while 1 is published."""
    ledger = StalenessLedger(staleness=0, groups_per_buffer=1, version=1)
    board = Board(Coordinator(CoordinatorSettings.of(PsrlConfig(), max_groups_in_flight=1, seed=1), ledger, num_instances=1))
    board.instance_is_up(0, 0)
    board.published(1)
    return board


def loop_of(board: Board, fleet: Instances, failures: list) -> SyncLoop:
    return SyncLoop(
        board=board,
        fleet=fleet,
        partial_rollout=PartialRolloutConfig(),
        activity=lambda text: None,
        failed=lambda instance, error: failures.append((instance, str(error))),
        retry_pause_s=PAUSE_S,
    )


def test_a_sync_that_failed_is_tried_again_after_a_pause_and_its_cause_is_told():
    async def run():
        board, fleet, failures = board_behind(), Instances(EngineError("memory is short"), None), []
        loop = loop_of(board, fleet, failures)
        syncing = asyncio.create_task(loop.run())
        await asyncio.wait_for(board.until_held(1), LIMIT_S)
        syncing.cancel()
        assert failures == [(0, "memory is short")]
        first, second = fleet.asked_at
        assert second - first >= PAUSE_S
        assert loop.take_metrics()["sync/pulls/count"] == 1.0

    asyncio.run(run())


def test_an_instance_that_never_takes_weights_ends_the_run_with_the_cause():
    failures: list = []
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(asyncio.wait_for(loop_of(board_behind(), Instances(EngineError("memory is short")), failures).run(), LIMIT_S))
    assert caught.group_contains(EngineError, match="memory is short")
    assert len(failures) == MAX_FAILURES


def test_weights_that_arrive_wrong_end_the_run_at_once():
    fleet = Instances(WeightSyncError("another checksum"))
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(asyncio.wait_for(loop_of(board_behind(), fleet, []).run(), LIMIT_S))
    assert caught.group_contains(WeightSyncError)
    assert len(fleet.asked_at) == 1
