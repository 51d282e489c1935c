"""Validation: every validation task is played with one version of the weights, beside the episodes of training."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from psrl.errors import DeadlineError
from psrl.runtime.board import Board
from psrl.runtime.fleet import Fleet
from psrl.runtime.groups import GroupRequest, GroupResult
from psrl.runtime.measures import validation_metrics
from psrl.runtime.tickets import validation_tickets
from psrl.runtime.worker_pool import WorkerPool
from psrl.telemetry import names
from psrl.types import Episode, PolicyVersion, Task


class Validation:
    """Plays validation tasks and measures them.

    Consumes: the validation tasks.
    Waits for: all their groups, `max_groups_in_flight` of them at once.
    Unblocked by: the agent workers, or each group's deadline.
    """

    def __init__(
        self,
        *,
        tasks: Sequence[Task],
        workers: WorkerPool,
        num_sampled: int,
        is_greedy_too: bool,
        run_seed: int,
        group_deadline_s: float,
        num_records: int,
        record: Callable[[Episode, int], None],
        max_groups_in_flight: int,
        progress: Callable[[int, int], None] = lambda num_done, num_tasks: None,
    ) -> None:
        """`record` sees the episodes of the first `num_records` tasks and their step; `progress` is called after each task."""
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
        self._places = asyncio.Semaphore(max_groups_in_flight)
        self.num_played = 0
        """Tasks, over all validations."""

    async def run(self, version: PolicyVersion, step: int, *, instances: Sequence[int] = ()) -> dict[str, float]:
        """Metrics named `val/...` of the weights `version`, which `step` training steps made.

        `instances` serve this version and take the tasks in turn; where none is named, any takes them.
        """
        began = time.monotonic()
        self._num_done = 0
        places = itertools.cycle(instances or (None,))
        plays = [self._play(index, task, version, place) for index, (task, place) in enumerate(zip(self._tasks, places, strict=False))]
        results = await asyncio.gather(*plays)
        for result in results:
            for episode in result.records:
                self._record(episode, step)
        sources = {result.group: task.data_source for result, task in zip(results, self._tasks, strict=True)}
        return {**validation_metrics(results, version, sources=sources), names.VAL_SECONDS: time.monotonic() - began}

    async def _play(self, index: int, task: Task, version: PolicyVersion, place: int | None) -> GroupResult:
        tickets = validation_tickets(
            task,
            num_sampled=self._num_sampled,
            is_greedy_too=self._is_greedy_too,
            version=version,
            run_seed=self._run_seed,
            instance=place,
        )
        request = GroupRequest(task=task, tickets=tickets, num_needed=len(tickets), wants_records=index < self._num_records)
        async with self._places:
            result = await self._workers.play(request, what=f"validation of {task.uid}", deadline_s=self._group_deadline_s)
        self.num_played += 1
        self._num_done += 1
        self._progress(self._num_done, len(self._tasks))
        return result


class ServingReplicas(Protocol):
    """Who serves a version while it is validated."""

    async def bring(self, version: PolicyVersion) -> None:
        """Until all of them serve it, which they do until `release`; the caller brings the limit."""

    def serving(self, version: PolicyVersion) -> Sequence[int]:
        """Instances that take tasks now."""

    def release(self) -> None:
        """The validation has ended."""


class TrainingReplicas(ServingReplicas):
    """Training's own, held at the version; those that died since may serve another one."""

    def __init__(self, board: Board) -> None:
        self._board = board

    async def bring(self, version: PolicyVersion) -> None:
        """See the protocol."""
        self._board.hold(version)
        await self._board.until_held(version)

    def serving(self, version: PolicyVersion) -> Sequence[int]:
        """See the protocol."""
        return self._board.instances_at(version)

    def release(self) -> None:
        """See the protocol."""
        self._board.release_hold()


class ValidationReplicas(ServingReplicas):
    """Those that serve validation alone: nobody else gives them weights."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def bring(self, version: PolicyVersion) -> None:
        """See the protocol."""
        await self._fleet.bring_for_validation(version)

    def serving(self, version: PolicyVersion) -> Sequence[int]:
        """See the protocol."""
        return range(len(self._fleet.validating))

    def release(self) -> None:
        """See the protocol."""


class ValidationLoop:
    """Validates one version after the other, while generation and training go on.

    Consumes: what `begin` asks for.
    Waits for: the validation's groups.
    Unblocked by: the agent workers, or each group's deadline.
    """

    def __init__(
        self,
        *,
        replicas: ServingReplicas,
        validation: Validation,
        begun: Callable[[int], None],
        done: Callable[[dict[str, float], int], None],
        hold_deadline_s: float,
    ) -> None:
        """`begun` and `done` are told the step; `done` the metrics, too."""
        self._replicas = replicas
        self._validation = validation
        self._begun = begun
        self._done = done
        self._hold_deadline_s = hold_deadline_s
        self._wanted: asyncio.Queue[tuple[int, PolicyVersion]] = asyncio.Queue()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def begin(self, step: int, version: PolicyVersion) -> None:
        """Validate `version`, the newest weights, which replicas keep until it is done.

        Waits for: the end of the validation before, and every replica to serve the version, within the deadline of a weight sync. Until
        then nothing newer may be published, so that what is to be validated can be had. Unblocked by: the agent workers, the sync loop.

        Raises:
            DeadlineError: Replicas did not take the version in time.
        """
        await self._is_idle.wait()
        self._is_idle.clear()
        try:
            async with asyncio.timeout(self._hold_deadline_s):
                await self._replicas.bring(version)
        except TimeoutError as error:
            what = f"validation of step {step}: replicas did not take weights {version}"
            raise DeadlineError(f"{what} within {self._hold_deadline_s:g} s") from error
        self._wanted.put_nowait((step, version))

    @property
    def num_done(self) -> int:
        """Tasks that were played, over all validations."""
        return self._validation.num_played

    async def finish(self) -> None:
        """Until nothing is being validated."""
        await self._is_idle.wait()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            step, version = await self._wanted.get()
            self._begun(step)
            try:
                instances = self._replicas.serving(version)
                self._done(await self._validation.run(version, step, instances=instances), step)
            finally:
                self._replicas.release()
            self._is_idle.set()
