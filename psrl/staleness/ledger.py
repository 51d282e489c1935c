"""Slots of training data per policy version, and the bound on how old they may be.

Invariant: a group in buffer v was admitted at version v - staleness or newer. `reserve` takes the latest admissible buffer and
`occupy` the earliest one with room, so a late group can only move to an earlier buffer, where it is fresher than the bound asks.

Counting only: no tensors, no I/O, no locks. The caller serialises calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from psrl.staleness.buffer import Buffer
from psrl.types import GroupUid, PolicyVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class Consumed:
    """What one update trains on."""

    version: PolicyVersion
    """V_buf: the weights that the update starts from."""
    groups: tuple[GroupUid, ...]
    max_version_gap: int
    """Largest V_buf - V_traj; never above the staleness."""


class StalenessLedger:
    """Reserve, occupy, consume, advance.

    Example:
        staleness=0, 2 groups a buffer, version 0: two reserves succeed, a third returns None until `consume` and `advance`.
    """

    def __init__(self, *, staleness: int, groups_per_buffer: int, version: PolicyVersion) -> None:
        assert staleness >= 0, f"staleness={staleness}"
        assert groups_per_buffer >= 1, f"groups_per_buffer={groups_per_buffer}"
        self._staleness = staleness
        self._capacity = groups_per_buffer
        self._version = version
        self._buffers = {v: Buffer(PolicyVersion(v), groups_per_buffer) for v in range(version, version + staleness + 1)}
        self._admitted: dict[GroupUid, tuple[PolicyVersion, PolicyVersion]] = {}
        """In flight: V_traj and the buffer that holds the reservation."""
        self._is_consumed = False

    @property
    def version(self) -> PolicyVersion:
        """The weights that groups are admitted with now."""
        return self._version

    @property
    def in_flight(self) -> tuple[GroupUid, ...]:
        """Groups that hold a reservation."""
        return tuple(self._admitted)

    def reserve(self, group: GroupUid) -> PolicyVersion | None:
        """Admit a group: its V_traj, or None while no admissible buffer has a free slot."""
        assert group not in self._admitted, f"group {group} has a reservation already"
        for v in range(self._version + self._staleness, self._version - 1, -1):
            buffer = self._buffers[v]
            if buffer.num_free > 0 and not (self._is_consumed and v == self._version):
                buffer.reserved.add(group)
                self._admitted[group] = (self._version, buffer.version)
                return self._version
        return None

    def occupy(self, group: GroupUid) -> PolicyVersion:
        """A group has arrived: the buffer that takes it, the earliest with room.

        Where an earlier buffer has no free slot but a reservation that may move, this group takes that slot and the reservation
        moves to the buffer that this group was promised.
        """
        admitted, promised = self._admitted.pop(group)
        self._buffers[promised].reserved.remove(group)
        for v in range(self._version, promised + 1):
            buffer = self._buffers[v]
            if self._is_consumed and v == self._version:
                continue
            has_room = buffer.num_free > 0 or (bool(buffer.reserved) and self._move_reservation(buffer, self._buffers[promised]))
            if has_room:
                buffer.occupied[group] = admitted
                return buffer.version
        raise AssertionError(f"group {group} held a reservation in buffer {promised} and found no slot")

    def release(self, group: GroupUid) -> None:
        """Give a reservation back: the group was filtered out, failed or was aborted."""
        _, promised = self._admitted.pop(group)
        self._buffers[promised].reserved.remove(group)

    def is_ready(self) -> bool:
        """Whether the buffer of the current version is full of arrived groups."""
        return not self._is_consumed and self._buffers[self._version].is_ready

    def consume(self) -> Consumed:
        """Take the ready buffer of the current version; `advance` must follow when the update is made."""
        assert self.is_ready(), f"buffer {self._version} is not ready"
        buffer = self._buffers[self._version]
        gap = max(self._version - admitted for admitted in buffer.occupied.values())
        assert gap <= self._staleness, f"buffer {self._version} holds data {gap} versions old, bound {self._staleness}"
        self._is_consumed = True
        return Consumed(version=self._version, groups=tuple(buffer.occupied), max_version_gap=gap)

    def advance(self) -> PolicyVersion:
        """The update is made and served: later groups are admitted with the new version."""
        assert self._is_consumed, f"buffer {self._version} was not consumed"
        del self._buffers[self._version]
        self._version = PolicyVersion(self._version + 1)
        last = self._version + self._staleness
        self._buffers[last] = Buffer(PolicyVersion(last), self._capacity)
        self._is_consumed = False
        return self._version

    def _move_reservation(self, source: Buffer, target: Buffer) -> bool:
        """Pass one reservation on to a later buffer that its own V_traj still admits; False if there is none."""
        for group in sorted(source.reserved):
            admitted, _ = self._admitted[group]
            if target.version <= admitted + self._staleness:
                source.reserved.remove(group)
                target.reserved.add(group)
                self._admitted[group] = (admitted, target.version)
                return True
        return False
