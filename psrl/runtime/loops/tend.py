"""The tend loops: what happens to groups while they are in flight, apart from playing them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from psrl.runtime.board import Board, Unwanted
from psrl.runtime.fleet import Fleet
from psrl.runtime.group_play import EndHow
from psrl.runtime.worker_pool import WorkerPool
from psrl.telemetry import names
from psrl.telemetry.group_log import Fate
from psrl.types import GroupUid

TICK_S = 0.5
"""How often loads are read and groups in flight looked at."""


class EndLoop:
    """Ends the episodes of groups that are not wanted any more.

    Consumes: such groups of the board.
    Waits for: the next one; the answers of agent workers, side by side, each with a deadline.
    Unblocked by: the train loop (others came first) and the tend loop (a filter).
    """

    def __init__(self, *, board: Board, workers: WorkerPool) -> None:
        self._board = board
        self._workers = workers

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as ends:
            while True:
                group = await self._board.next_to_end()
                ends.create_task(self._end(group), name=f"end of group {group}")

    async def _end(self, group: GroupUid) -> None:
        with self._board.being_ended(group):
            await self._workers.end_group(group, EndHow.CANCEL)


class TendLoop:
    """Observes replicas, moves groups and applies the proactive filter.

    Consumes: nothing.
    Waits for: its tick; the answers of replicas and agent workers, each with a deadline.
    Unblocked by: time.
    """

    def __init__(self, *, board: Board, fleet: Fleet, workers: WorkerPool, num_restarts: Callable[[], int]) -> None:
        """`num_restarts`: of all processes, since the start."""
        self._board = board
        self._fleet = fleet
        self._workers = workers
        self._num_restarts = num_restarts
        self._num_restarts_told = 0
        self._num_idle = self._num_seen = self._num_moves = self._num_acted = 0
        self._num_running = self._num_waiting = 0

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            await self._observe()
            await self._move()
            await self._filter()

    def take_metrics(self) -> dict[str, float]:
        """Of the time since the last call."""
        restarts = self._num_restarts()
        metrics = {
            names.GROUPS_MOVED_COUNT: float(self._num_moves),
            names.GROUPS_OVERDUE_COUNT: float(self._num_acted),
            names.PROCESSES_RESTARTS_COUNT: float(restarts - self._num_restarts_told),
        }
        self._num_restarts_told = restarts
        if self._num_seen:
            metrics[names.REPLICAS_IDLE_SHARE] = self._num_idle / self._num_seen
            metrics[names.REPLICAS_RUNNING_MEAN] = self._num_running / self._num_seen
            metrics[names.REPLICAS_WAITING_MEAN] = self._num_waiting / self._num_seen
        self._num_idle = self._num_seen = self._num_moves = self._num_acted = 0
        self._num_running = self._num_waiting = 0
        return metrics

    async def _observe(self) -> None:
        loads = await self._fleet.loads()
        self._board.observe(loads)
        for load in loads.values():
            self._num_seen += 1
            self._num_idle += load.num_running == 0
            self._num_running += load.num_running
            self._num_waiting += load.num_waiting

    async def _move(self) -> None:
        for move in self._board.due_moves():
            await self._workers.move_group(move.group, move.target)
            self._board.moved(move)
            self._num_moves += 1

    async def _filter(self) -> None:
        for overdue in self._board.overdue():
            self._num_acted += 1
            if overdue.action == "truncate":
                with self._board.being_ended(overdue.group):
                    await self._workers.end_group(overdue.group, EndHow.TRUNCATE)
            else:
                self._board.give_up(overdue.group, Unwanted(fate=Fate.NULL, may_come_again=overdue.action == "retry"))
