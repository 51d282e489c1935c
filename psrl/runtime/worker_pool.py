"""The agent workers of a run as one: groups go to the one with the least to do, and a worker's death costs time and no group."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import ray

from psrl.errors import ActorDiedError, DeadlineError
from psrl.runtime.groups import EndHow, GroupRequest, GroupResult
from psrl.runtime.kept_actor import KeptActor
from psrl.runtime.supervision import answer_of
from psrl.types import GroupUid

CONTROL_DEADLINE_S = 30.0
"""Of `end_group` and `move_group`, which only tell a worker something."""


class WorkerPool:
    """Agent workers, kept alive.

    A group that was being played by a worker that died is played again from its start by another one, or by that one's successor, under
    the same uids: rows that the dead one had put are replaced, sessions that it had opened are closed by those that are opened anew.
    """

    def __init__(self, workers: Sequence[KeptActor], *, note: Callable[[str], None]) -> None:
        """`note` takes a line for people for every worker that died with groups."""
        self.workers = tuple(workers)
        self._note = note
        self._worker_of: dict[GroupUid, KeptActor] = {}
        self._ended: dict[GroupUid, EndHow] = {}
        """Groups in flight that are to end early: whoever plays them next is told, too."""
        self._num_playing = dict.fromkeys(self.workers, 0)
        self._changed = asyncio.Event()
        self.num_resent = 0
        """Groups that were sent again, so far."""
        for worker in self.workers:
            worker.on_change(lambda worker=worker: self._look_at(worker))

    async def play(self, request: GroupRequest, *, what: str, deadline_s: float) -> GroupResult:
        """Have a group played; a worker that dies is left for another.

        Waits for: a worker that is up, then its answer. Unblocked by: the worker, its successor, or the deadline.

        Raises:
            DeadlineError: It did not end within `deadline_s`, counted over all workers that tried.
            PsrlError: What the worker raised.
        """
        group = request.tickets[0].group
        until = time.monotonic() + deadline_s
        try:
            while True:
                worker = await self._least_busy(what, until)
                try:
                    return await self._play_in(worker, request, what, until)
                except ActorDiedError:
                    self.num_resent += 1
        finally:
            self._ended.pop(group, None)

    async def end_group(self, group: GroupUid, how: EndHow) -> None:
        """Have a group in flight ended early; one that is not being played is left alone."""
        if group in self._worker_of:
            self._ended[group] = how
            worker = self._worker_of[group]
            await self._tell(worker, worker.handle, "end_group", group, how)

    async def move_group(self, group: GroupUid, instance: int) -> None:
        """Have a group in flight go on at another instance; one that is not being played is left alone."""
        if group in self._worker_of:
            worker = self._worker_of[group]
            await self._tell(worker, worker.handle, "move_group", group, instance)

    async def _play_in(self, worker: KeptActor, request: GroupRequest, what: str, until: float) -> GroupResult:
        group, handle = request.tickets[0].group, worker.handle
        self._worker_of[group] = worker
        self._num_playing[worker] += 1
        try:
            answer = handle.run_group.remote(request)
            if group in self._ended:
                await self._tell(worker, handle, "end_group", group, self._ended[group])
            result: GroupResult = await answer_of(f"{what} in {worker.name}", answer, until - time.monotonic())
            return result
        except ActorDiedError:
            worker.suspect(handle)
            raise
        finally:
            self._num_playing[worker] -= 1
            del self._worker_of[group]

    async def _tell(self, worker: KeptActor, handle: ray.actor.ActorHandle, call: str, group: GroupUid, argument: EndHow | int) -> None:
        method = handle.end_group if call == "end_group" else handle.move_group
        try:
            await answer_of(f"{call} of {group} in {worker.name}", method.remote(group, argument), CONTROL_DEADLINE_S)
        except ActorDiedError:
            worker.suspect(handle)  # its groups are played again by others

    def _look_at(self, worker: KeptActor) -> None:
        self._changed.set()
        if not worker.is_up and self._num_playing[worker]:
            self._note(f"{self._num_playing[worker]} groups that were in {worker.name} are played again")

    async def _least_busy(self, what: str, until: float) -> KeptActor:
        while not (up := [worker for worker in self.workers if worker.is_up]):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), until - time.monotonic())
            except TimeoutError as error:
                raise DeadlineError(f"{what}: no agent worker was up before its deadline") from error
        return min(up, key=lambda worker: self._num_playing[worker])
