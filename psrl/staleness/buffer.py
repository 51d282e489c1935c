"""The training data of one update: which groups have arrived for it, and the four states of that."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from psrl.types import GroupUid, PolicyVersion


class BufferState(StrEnum):
    """How far a buffer is, by the groups in it and by those in flight."""

    PENDING = "pending"
    """Fewer groups than the update needs, and a slot that nobody was promised."""
    STUCK = "stuck"
    """Fewer groups than the update needs, and every slot promised: all depends on groups in flight."""
    READY = "ready"
    """The update can be made, and no group in flight was admitted for it in vain."""
    READY_WITH_CAPACITY = "ready_with_capacity"
    """The update can be made; redundant groups admitted for it are still in flight."""


@dataclass(slots=True)
class Buffer:
    """Arrived groups of the update that turns weights `version` into `version + 1`.

    Invariant: len(occupied) <= quota, and num_redundant is 0 until they are equal.
    """

    version: PolicyVersion
    quota: int
    """Groups that the update trains on."""
    capacity: int
    """Groups that may be admitted for it: the quota and the redundant ones."""
    occupied: dict[GroupUid, PolicyVersion] = field(default_factory=dict)
    """Arrived groups with their V_traj, in order of arrival."""
    num_redundant: int = 0
    """Of a full buffer: groups in flight that were admitted for it and have no slot elsewhere. Only falls."""

    @property
    def is_full(self) -> bool:
        """Whether the update can be made."""
        return len(self.occupied) == self.quota

    @property
    def num_slots(self) -> int:
        """Groups in flight that can be meant for it."""
        return self.num_redundant if self.is_full else self.capacity - len(self.occupied)

    @property
    def num_slots_to_promise(self) -> int:
        """Of them, those that a newly admitted group may get: none once the update has what it needs."""
        return 0 if self.is_full else self.capacity - len(self.occupied)

    def add(self, group: GroupUid, admitted: PolicyVersion) -> None:
        """A group has arrived; the last one that the update needs makes the others redundant."""
        assert not self.is_full, f"buffer {self.version} has what it needs"
        self.occupied[group] = admitted
        if self.is_full:
            self.num_redundant = self.capacity - self.quota
