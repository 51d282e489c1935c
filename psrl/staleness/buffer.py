"""The slots of one policy version: which groups are promised to it and which have arrived."""

from __future__ import annotations

from dataclasses import dataclass, field

from psrl.types import GroupUid, PolicyVersion


@dataclass(slots=True)
class Buffer:
    """Training data of one update: the one that turns weights `version` into `version + 1`.

    Invariant: len(reserved) + len(occupied) <= capacity.
    """

    version: PolicyVersion
    capacity: int
    reserved: set[GroupUid] = field(default_factory=set)
    """Promised to groups that are still being generated."""
    occupied: dict[GroupUid, PolicyVersion] = field(default_factory=dict)
    """Arrived groups with their V_traj, in order of arrival."""

    @property
    def num_free(self) -> int:
        """Slots that nobody was promised."""
        return self.capacity - len(self.reserved) - len(self.occupied)

    @property
    def is_ready(self) -> bool:
        """Whether the update can be made."""
        return len(self.occupied) == self.capacity
