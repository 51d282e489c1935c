"""The board on which loops meet: which groups may start, which are in flight, which have arrived.

One owner of the ledger. All methods run in the controller's event loop, so counting needs no lock; waiting has a condition.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from psrl.runtime.groups import GroupResult
from psrl.staleness import Consumed, StalenessLedger
from psrl.types import GroupUid, PolicyVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadyBuffer:
    """What the train loop takes: a full buffer."""

    consumed: Consumed
    groups: tuple[GroupResult, ...]
    """In the order of their uids, so that an update does not depend on who arrived first."""


class Board:
    """Admission and arrival, serialised."""

    def __init__(self, ledger: StalenessLedger) -> None:
        self._ledger = ledger
        self._arrived: dict[GroupUid, GroupResult] = {}
        self._changed = asyncio.Condition()

    @property
    def version(self) -> PolicyVersion:
        """The weights that new groups are admitted with."""
        return self._ledger.version

    @property
    def in_flight(self) -> tuple[GroupUid, ...]:
        """Groups being generated."""
        return self._ledger.in_flight

    @property
    def num_arrived(self) -> int:
        """Groups that wait for their update."""
        return len(self._arrived)

    async def admit(self, group: GroupUid) -> PolicyVersion:
        """Reserve a slot; waits until one is free. Unblocked by `drop` and `advance`."""
        async with self._changed:
            while (version := self._ledger.reserve(group)) is None:
                await self._changed.wait()
            return version

    async def arrive(self, result: GroupResult) -> None:
        """A group that will be trained on."""
        async with self._changed:
            self._ledger.occupy(result.group)
            self._arrived[result.group] = result
            self._changed.notify_all()

    async def drop(self, group: GroupUid) -> None:
        """A group that will not be trained on: its slot is free again."""
        async with self._changed:
            self._ledger.release(group)
            self._changed.notify_all()

    async def take_ready(self) -> ReadyBuffer:
        """The full buffer of the current version; waits until it is. Unblocked by `arrive`."""
        async with self._changed:
            while not self._ledger.is_ready():
                await self._changed.wait()
            consumed = self._ledger.consume()
            return ReadyBuffer(consumed=consumed, groups=tuple(self._arrived.pop(group) for group in sorted(consumed.groups)))

    async def advance(self) -> PolicyVersion:
        """The update is made and served."""
        async with self._changed:
            version = self._ledger.advance()
            self._changed.notify_all()
            return version
