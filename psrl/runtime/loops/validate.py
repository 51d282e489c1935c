"""Validation: every validation task is played with the weights that the replicas serve now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import ray

from psrl.runtime.groups import GroupRequest, GroupResult
from psrl.runtime.measures import validation_metrics
from psrl.runtime.supervision import answer_of
from psrl.runtime.tickets import validation_tickets
from psrl.telemetry import names
from psrl.types import Episode, PolicyVersion, Task


class Validation:
    """Plays validation tasks and measures them.

    Consumes: the validation tasks.
    Waits for: all their groups.
    Unblocked by: the agent workers, or each group's deadline.
    """

    def __init__(
        self,
        *,
        tasks: Sequence[Task],
        workers: Sequence[ray.actor.ActorHandle],
        num_sampled: int,
        is_greedy_too: bool,
        run_seed: int,
        group_deadline_s: float,
        num_records: int,
        record: Callable[[Episode], None],
        progress: Callable[[int, int], None] = lambda num_done, num_tasks: None,
    ) -> None:
        """`record` sees the episodes of the first `num_records` tasks, at the end; `progress` is called after each task."""
        self._tasks = tasks
        self._workers = workers
        self._num_sampled = num_sampled
        self._is_greedy_too = is_greedy_too
        self._run_seed = run_seed
        self._group_deadline_s = group_deadline_s
        self._num_records = num_records
        self._record = record
        self._progress = progress
        self._num_done = 0

    async def run(self, version: PolicyVersion) -> dict[str, float]:
        """Metrics named `val/...`."""
        began = time.monotonic()
        self._num_done = 0
        results = await asyncio.gather(*(self._play(index, task, version) for index, task in enumerate(self._tasks)))
        for result in results:
            for episode in result.records:
                self._record(episode)
        return {**validation_metrics(results), names.VAL_SECONDS: time.monotonic() - began}

    async def _play(self, index: int, task: Task, version: PolicyVersion) -> GroupResult:
        tickets = validation_tickets(
            task, num_sampled=self._num_sampled, is_greedy_too=self._is_greedy_too, version=version, run_seed=self._run_seed
        )
        worker = self._workers[index % len(self._workers)]
        request = GroupRequest(task=task, tickets=tickets, wants_records=index < self._num_records)
        result: GroupResult = await answer_of(f"validation of {task.uid}", worker.run_group.remote(request), self._group_deadline_s)
        self._num_done += 1
        self._progress(self._num_done, len(self._tasks))
        return result
