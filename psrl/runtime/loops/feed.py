"""The feed loop: tasks become groups in flight."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import ray

from psrl.datasets.source import TaskSource
from psrl.runtime.board import Board
from psrl.runtime.groups import GroupRequest, GroupResult
from psrl.runtime.supervision import answer_of
from psrl.runtime.tickets import training_tickets
from psrl.types import GroupUid, PolicyVersion, Task


class FeedLoop:
    """Admits tasks while the ledger has room and has them played.

    Consumes: tasks of the source, in order, without end.
    Waits for: a free slot on the board.
    Unblocked by: the assemble loop (a dropped group) and the train loop (an advanced version).
    """

    def __init__(
        self,
        *,
        source: TaskSource,
        board: Board,
        workers: Sequence[ray.actor.ActorHandle],
        arrivals: asyncio.Queue[GroupResult],
        rollout_n: int,
        run_seed: int,
        group_deadline_s: float,
        wants_records: Callable[[], bool],
    ) -> None:
        self._source = source
        self._board = board
        self._workers = itertools.cycle(workers)
        self._arrivals = arrivals
        self._rollout_n = rollout_n
        self._run_seed = run_seed
        self._group_deadline_s = group_deadline_s
        self._wants_records = wants_records
        self._pending_state = source.state_dict()

    @property
    def pending_state(self) -> dict[str, Any]:
        """The data order before the task that waits for admission: where a checkpoint between two steps goes on."""
        return self._pending_state

    async def run(self) -> None:
        """Until cancelled; a group that fails ends the run with its error."""
        async with asyncio.TaskGroup() as plays:
            while True:
                self._pending_state = self._source.state_dict()
                (task,) = self._source.next_tasks(1)
                version = await self._board.admit(GroupUid(task.uid))
                plays.create_task(self._play(task, version, next(self._workers)), name=f"group {task.uid}")

    async def _play(self, task: Task, version: PolicyVersion, worker: ray.actor.ActorHandle) -> None:
        tickets = training_tickets(task, rollout_n=self._rollout_n, version=version, run_seed=self._run_seed)
        request = GroupRequest(task=task, tickets=tickets, wants_records=self._wants_records())
        result = await answer_of(f"group {task.uid}", worker.run_group.remote(request), self._group_deadline_s)
        await self._arrivals.put(result)
