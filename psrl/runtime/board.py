"""The board on which the loops meet: which groups may start, which are in flight, which have arrived, what replicas are to do.

One owner of the coordinator and its ledger. All methods run in the controller's event loop and none of them awaits between looking
and changing, so counting needs no lock; who waits looks again after every change.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from psrl.runtime.groups import GroupResult
from psrl.staleness import Admission, Consumed, Coordinator, InstanceLoad, Move, Outstanding, Overdue, SyncOrder
from psrl.telemetry.group_log import Fate
from psrl.types import GroupUid, PolicyVersion, Task

Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A task that waits for admission, or a group that is in flight."""

    task: Task
    attempt: int = 0
    """How often it was issued before."""

    @property
    def group(self) -> GroupUid:
        """The uid of its group."""
        return GroupUid(self.task.uid)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unwanted:
    """Why a group in flight is not to be trained on."""

    fate: Fate
    """If it is not issued again."""
    may_come_again: bool


SURPLUS = Unwanted(fate=Fate.SURPLUS, may_come_again=True)
"""Others came first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyBuffer:
    """What the train loop takes: a full buffer."""

    consumed: Consumed
    groups: tuple[GroupResult, ...]
    """In the order of their uids, so that an update does not depend on who arrived first."""


class Board:
    """Admission, arrival and orders, serialised."""

    def __init__(self, coordinator: Coordinator, *, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds that never go back."""
        self._coordinator = coordinator
        self._clock = clock
        self._in_flight: dict[GroupUid, Candidate] = {}
        self._arrived: dict[GroupUid, GroupResult] = {}
        self._unwanted: dict[GroupUid, Unwanted] = {}
        self._to_end: dict[GroupUid, None] = {}
        self._being_ended: set[GroupUid] = set()
        self._reissues: dict[GroupUid, Candidate] = {}
        self._changed = asyncio.Event()

    # ------------------------------------------------------------ what there is

    @property
    def version(self) -> PolicyVersion:
        """The weights of the trainer: the buffer of this version is trained on next."""
        return self._coordinator.ledger.version

    @property
    def in_flight(self) -> tuple[Candidate, ...]:
        """Groups that have no fate yet and have not arrived, those that wait to be issued again included; in order of admission."""
        return (*self._in_flight.values(), *self._reissues.values())

    @property
    def num_in_flight(self) -> int:
        """Groups being generated."""
        return len(self._in_flight)

    @property
    def arrived(self) -> tuple[GroupResult, ...]:
        """Groups that wait for their update."""
        return tuple(self._arrived.values())

    @property
    def coordinator(self) -> Coordinator:
        """For reading; changes go through the board, which wakes who waits."""
        return self._coordinator

    def outstanding(self) -> list[Outstanding]:
        """What is in flight, since when and where; the oldest first."""
        return self._coordinator.outstanding(self._clock())

    # ------------------------------------------------------------ groups

    async def admit(self, next_new: Callable[[], Candidate], *, prompt_of: Callable[[Task], str]) -> tuple[Candidate, Admission]:
        """Reserve a slot for the next group, one that is issued again before a new one; waits until there is room.

        Unblocked by `leave`, `arrive`, `advance`, `synced` and whatever else makes room. `next_new` looks at the next new task
        without taking it.
        """

        def admitted() -> tuple[Candidate, Admission] | None:
            again = next((each for group, each in self._reissues.items() if group not in self._being_ended), None)
            candidate = again or next_new()
            admission = self._coordinator.admit(candidate.group, now_s=self._clock(), prompt=prompt_of(candidate.task))
            return None if admission is None else (candidate, admission)

        candidate, admission = await self._until(admitted)
        self._reissues.pop(candidate.group, None)
        self._in_flight[candidate.group] = candidate
        return candidate, admission

    def unwanted(self, group: GroupUid) -> Unwanted | None:
        """Why a group in flight is not wanted any more; None where it is."""
        return self._unwanted.get(group)

    def arrive(self, result: GroupResult) -> bool:
        """A group that can be trained on. False: no buffer takes it any more, and it must be left out."""
        buffer = self._coordinator.arrive(result.group, oldest=result.oldest_version)
        if buffer is None:
            self._unwanted[result.group] = SURPLUS
        else:
            del self._in_flight[result.group]
            self._arrived[result.group] = replace(result, records=())  # episodes were written down, or are not wanted
        self._wake()
        return buffer is not None

    def leave(self, group: GroupUid, *, may_come_again: bool) -> bool:
        """A group that has ended and is not trained on. Whether it will be issued again, which `psrl.max_reissues` bounds."""
        candidate = self._in_flight.pop(group)
        self._to_end.pop(group, None)
        if self._unwanted.pop(group, None) is None:
            self._coordinator.release(group)
        is_again = may_come_again and self._coordinator.reissue(group)
        if is_again:
            self._reissues[group] = Candidate(task=candidate.task, attempt=candidate.attempt + 1)
        self._wake()
        return is_again

    def give_up(self, group: GroupUid, why: Unwanted) -> None:
        """A group in flight is not wanted any more; `next_to_end` names it, and its result will be left out."""
        self._coordinator.release(group)
        self._mark_unwanted(group, why)
        self._wake()

    async def next_to_end(self) -> GroupUid:
        """A group whose episodes are to be ended; waits for one. Unblocked by `take_ready` and `give_up`."""
        group = await self._until(lambda: next(iter(self._to_end), None))
        del self._to_end[group]
        return group

    @contextmanager
    def being_ended(self, group: GroupUid) -> Iterator[None]:
        """While somebody tells its worker to end it, it is not admitted again: the word could reach the next attempt."""
        self._being_ended.add(group)
        try:
            yield
        finally:
            self._being_ended.discard(group)
            self._wake()

    # ------------------------------------------------------------ updates

    async def take_ready(self) -> ReadyBuffer:
        """The full buffer of the current version; waits until it is. Unblocked by `arrive`."""
        await self._until(lambda: True if self._coordinator.ledger.is_ready() else None)
        consumed = self._coordinator.consume()
        for group in consumed.expired:
            self._mark_unwanted(group, SURPLUS)
        groups = tuple(self._arrived.pop(group) for group in sorted(consumed.groups))
        self._wake()
        return ReadyBuffer(consumed=consumed, groups=groups)

    def advance(self) -> PolicyVersion:
        """The update is made."""
        version = self._coordinator.advance()
        self._wake()
        return version

    def published(self, version: PolicyVersion) -> None:
        """The parameter server holds `version`: replicas may take it."""
        self._coordinator.published(version)
        self._wake()

    # ------------------------------------------------------------ replicas

    async def next_syncs(self) -> list[SyncOrder]:
        """Instances that are to take newer weights now; waits until there are some. Unblocked by `published`, arrivals, `observe`."""
        return await self._until(lambda: self._coordinator.due_syncs() or None)

    def sync_began(self, instance: int) -> None:
        """It admits nothing until `synced`."""
        self._coordinator.sync_began(instance)

    def synced(self, instance: int, version: PolicyVersion) -> None:
        """It serves `version`."""
        self._coordinator.synced(instance, version)
        self._wake()

    def sync_failed(self, instance: int) -> None:
        """It serves what it served before, or is gone."""
        self._coordinator.sync_failed(instance)
        self._wake()

    def instance_is_up(self, instance: int, version: PolicyVersion) -> None:
        """It may be given groups."""
        self._coordinator.instance_is_up(instance, version)
        self._wake()

    def instance_is_down(self, instance: int) -> None:
        """It is given no more; its turns go on elsewhere or wait for it."""
        self._coordinator.instance_is_down(instance)
        self._wake()

    def observe(self, loads: dict[int, InstanceLoad]) -> None:
        """What instances say of themselves."""
        for instance, load in loads.items():
            self._coordinator.observe(instance, load)
        self._wake()

    def hold(self, version: PolicyVersion) -> None:
        """Bring every instance to exactly `version` and keep it there until `release_hold`; generation goes on."""
        self._coordinator.hold(version)
        self._wake()

    async def until_held(self, version: PolicyVersion) -> None:
        """Until every instance serves the version of `hold`. Unblocked by the syncs that it asked for."""
        await self._until(lambda: True if self._coordinator.is_held_at(version) else None)

    def instances_at(self, version: PolicyVersion) -> tuple[int, ...]:
        """Those that serve exactly `version`; empty where there is only one to choose."""
        return self._coordinator.serving(version) if len(self._coordinator.instances) > 1 else ()

    def places_of(self, admission: Admission) -> tuple[int, ...] | None:
        """The instance of each episode; None where there is only one to choose, behind which SMG may have several replicas."""
        return admission.instances if len(self._coordinator.instances) > 1 else None

    def release_hold(self) -> None:
        """Instances may take newer weights again."""
        self._coordinator.release_hold()
        self._wake()

    def due_moves(self) -> list[Move]:
        """Groups that would be better off on another instance."""
        return self._coordinator.due_moves()

    def moved(self, move: Move) -> None:
        """It was done."""
        self._coordinator.moved(move.group, move.target)
        self._wake()

    def overdue(self) -> list[Overdue]:
        """Groups in flight for too long, each named once."""
        return self._coordinator.overdue(self._clock())

    def restore(self, arrived: Sequence[GroupResult], reissues: Sequence[Candidate]) -> None:
        """What a checkpoint knew of: groups that wait for their update, and those to be issued again."""
        self._arrived = {result.group: result for result in arrived}
        self._reissues.update((candidate.group, candidate) for candidate in reissues)
        self._coordinator.remember_attempts({candidate.group: candidate.attempt for candidate in reissues})

    # ------------------------------------------------------------ waiting

    def _mark_unwanted(self, group: GroupUid, why: Unwanted) -> None:
        self._unwanted[group] = why
        self._to_end[group] = None

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until(self, look: Callable[[], Found | None]) -> Found:
        while (found := look()) is None:
            await self._changed.wait()
        return found
