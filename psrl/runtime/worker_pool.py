"""The agent workers of a run as one: groups go to the one with the least to do, and a worker's death costs time and no group."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from psrl.data_plane import DataPlane
from psrl.data_plane.memory import meta_of
from psrl.errors import ActorDiedError, DeadlineError
from psrl.runtime.group_play import EndHow
from psrl.runtime.groups import GroupRequest, GroupResult, summary_without_episode
from psrl.runtime.kept_actor import KeptActor
from psrl.runtime.supervision import answer_of
from psrl.types import EpisodeTicket, GroupUid, Outcome

CONTROL_DEADLINE_S = 30.0
"""Of `end_group` and `move_group`, which only tell a worker something."""


class WorkerPool:
    """Agent workers, kept alive.

    A group that was being played by a worker that died is played again from its start by another one, or by that one's successor, under
    the same uids: rows that the dead one had put are replaced, sessions that it had opened are closed by those that are opened anew.
    """

    def __init__(
        self,
        workers: Sequence[KeptActor],
        *,
        data_plane: DataPlane,
        max_resends: int,
        note: Callable[[str], None],
        is_near: Callable[[int, int, bool], bool] = lambda worker, instance, is_validation: True,
    ) -> None:
        """`max_resends`: a group that cost more workers than that is given up; `note` takes a line for people for what died with groups;
        `is_near`: whether a worker (by index) lies on the node of an instance, of training or of validation."""
        self.workers = tuple(workers)
        self._is_near = is_near
        self._data_plane = data_plane
        self._max_resends = max_resends
        self._note = note
        self._playing: dict[GroupUid, KeptActor | None] = {}
        """None: it waits for a worker."""
        self._ended: dict[GroupUid, EndHow] = {}
        self._moved: dict[GroupUid, int] = {}
        """What groups in flight were told, for whoever plays them next."""
        self._num_playing = dict.fromkeys(self.workers, 0)
        self._changed = asyncio.Event()
        for worker in self.workers:
            worker.on_change(lambda worker=worker: self._look_at(worker))

    async def play(self, request: GroupRequest, *, what: str, deadline_s: float) -> GroupResult:
        """Have a group played; a worker that dies is left for another. One that costs too many workers ends `infra_error`.

        Waits for: a worker that is up, then its answer. Unblocked by: the worker, its successor, or the deadline.

        Raises:
            DeadlineError: It did not end within `deadline_s`, counted over all workers that tried.
            PsrlError: What the worker raised.
        """
        group = request.tickets[0].group
        until = time.monotonic() + deadline_s
        self._playing[group] = None
        try:
            for num_deaths in range(self._max_resends + 1):
                worker = await self._least_busy(what, until, request.tickets[0])
                try:
                    result = await self._play_in(worker, request, what, until)
                except ActorDiedError:
                    continue
                if num_deaths:
                    await asyncio.to_thread(self._clear_strays, result)
                return result
            self._note(f"{what} is given up: {self._max_resends + 1} agent workers died with it")
            return lost_group(request, error=f"{self._max_resends + 1} agent workers died with its group")
        finally:
            for told in (self._playing, self._ended, self._moved):
                told.pop(group, None)

    async def end_group(self, group: GroupUid, how: EndHow) -> None:
        """Have a group in flight ended early; one that is not being played is left alone."""
        if group in self._playing:
            self._ended[group] = how
            await self._tell(group)

    async def move_group(self, group: GroupUid, instance: int) -> None:
        """Have a group in flight go on at another instance; one that is not being played is left alone."""
        if group in self._playing:
            self._moved[group] = instance
            await self._tell(group)

    async def _play_in(self, worker: KeptActor, request: GroupRequest, what: str, until: float) -> GroupResult:
        group, handle = request.tickets[0].group, worker.handle
        self._playing[group] = worker
        self._num_playing[worker] += 1
        try:
            answer = handle.run_group.remote(request)
            await self._tell(group)
            result: GroupResult = await answer_of(f"{what} in {worker.name}", answer, until - time.monotonic())
            return result
        except ActorDiedError as error:
            worker.suspect(handle, str(error))
            raise
        finally:
            self._num_playing[worker] -= 1
            self._playing[group] = None

    async def _tell(self, group: GroupUid) -> None:
        """Tell who plays the group what it is to do. One that does not hear it is the supervisor's to replace."""
        worker = self._playing[group]
        if worker is None:
            return
        calls = []
        if group in self._moved:
            calls.append(worker.handle.move_group.remote(group, self._moved[group]))
        if group in self._ended:
            calls.append(worker.handle.end_group.remote(group, self._ended[group]))
        for call in calls:
            with suppress(ActorDiedError, DeadlineError):
                await answer_of(f"order about {group} to {worker.name}", call, CONTROL_DEADLINE_S)

    def _clear_strays(self, result: GroupResult) -> None:
        """Rows that a worker had put before it died, and that its successor did not replace."""
        kept = set(result.meta.keys)
        held = self._data_plane.keys()
        strays = [key for key in held if key.startswith(f"{result.group}-e") and key not in kept]
        self._data_plane.clear(strays)

    def _look_at(self, worker: KeptActor) -> None:
        self._changed.set()
        if not worker.is_up and self._num_playing[worker]:
            self._note(f"{self._num_playing[worker]} groups that were in {worker.name} are played again")

    async def _least_busy(self, what: str, until: float, ticket: EpisodeTicket) -> KeptActor:
        """Of those that are up: beside the instance that samples the group's turns, where there is one."""
        while not (up := [worker for worker in self.workers if worker.is_up]):
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), until - time.monotonic())
            except TimeoutError as error:
                raise DeadlineError(f"{what}: no agent worker was up before its deadline") from error
        near = [worker for worker in up if ticket.instance is not None and self._near(worker, ticket.instance, ticket)]
        return min(near or up, key=lambda worker: self._num_playing[worker])

    def _near(self, worker: KeptActor, instance: int, ticket: EpisodeTicket) -> bool:
        return self._is_near(self.workers.index(worker), instance, ticket.is_validation)


def lost_group(request: GroupRequest, *, error: str) -> GroupResult:
    """Of a group that nobody could play: every member ended `infra_error`."""
    summaries = tuple(summary_without_episode(ticket, Outcome.INFRA_ERROR, error=error) for ticket in request.tickets)
    return GroupResult(group=request.tickets[0].group, summaries=summaries, meta=meta_of([]), records=(), attempt=request.attempt)
