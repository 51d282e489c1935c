"""Slots of training data per policy version, and the bound on how old they may be.

Buffer v is the data of the update v -> v + 1: `groups_per_buffer` groups (the quota), of which `redundant_groups` more may be
admitted. A group admitted while version V was served may be trained on by buffers up to V + staleness: its deadline.

Invariants: a group in buffer v was admitted at version v - staleness or newer. The groups in flight fit, all at once, into the
slots that are left before their deadlines; which of them holds which slot is never fixed, so a promise needs no moving. A buffer
that is full promises no more slots; groups admitted for it that fit nowhere else are redundant: never more than redundant_groups
for one buffer, so that at most so many groups per update are played in vain. Proofs: docs/design/staleness.md.

Counting only: no tensors, no I/O, no locks. The caller serialises calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from psrl.staleness.buffer import Buffer, BufferState
from psrl.types import GroupUid, PolicyVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class Consumed:
    """What one update trains on."""

    version: PolicyVersion
    """V_buf: the weights that the update starts from."""
    admitted: Mapping[GroupUid, PolicyVersion]
    """V_traj of each group, in order of arrival."""
    max_version_gap: int
    """Largest V_buf - V_traj; never above the staleness."""
    expired: tuple[GroupUid, ...] = ()
    """Groups in flight for which no later buffer has a slot; they are released already. Never more than redundant_groups."""

    @property
    def groups(self) -> tuple[GroupUid, ...]:
        """In order of arrival."""
        return tuple(self.admitted)


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerSnapshot:
    """What a checkpoint keeps of a ledger: whole numbers and texts only."""

    version: PolicyVersion
    """Weights of the checkpoint: after `consume` the update counts as made."""
    occupied: Mapping[PolicyVersion, Mapping[GroupUid, PolicyVersion]]
    """Buffer -> arrived group -> V_traj, in order of arrival."""
    in_flight: tuple[GroupUid, ...]
    """To be issued again, in order of admission."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        occupied = {str(buffer): dict(groups) for buffer, groups in self.occupied.items()}
        return {"version": self.version, "occupied": occupied, "in_flight": list(self.in_flight)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> LedgerSnapshot:
        """From `as_dict`, also after a journey through JSON."""
        occupied = {
            PolicyVersion(int(buffer)): {GroupUid(group): PolicyVersion(admitted) for group, admitted in groups.items()}
            for buffer, groups in values["occupied"].items()
        }
        in_flight = tuple(GroupUid(group) for group in values["in_flight"])
        return cls(version=PolicyVersion(values["version"]), occupied=occupied, in_flight=in_flight)


class StalenessLedger:
    """Reserve, occupy, consume, advance.

    Example:
        staleness=0, 2 groups a buffer, version 0: two reserves succeed, a third returns None until `consume` and `advance`.
    """

    def __init__(
        self,
        *,
        staleness: int,
        groups_per_buffer: int,
        version: PolicyVersion,
        redundant_groups: int = 0,
        last_version: PolicyVersion | None = None,
    ) -> None:
        """`last_version`: buffers from it on are never opened, so that a run admits no more than it will train on."""
        assert staleness >= 0, f"staleness={staleness}"
        assert groups_per_buffer >= 1, f"groups_per_buffer={groups_per_buffer}"
        assert redundant_groups >= 0, f"redundant_groups={redundant_groups}"
        self._staleness = staleness
        self._quota = groups_per_buffer
        self._capacity = groups_per_buffer + redundant_groups
        self._last = last_version
        self._version = version
        self._is_consumed = False
        self._buffers: dict[int, Buffer] = {}
        """Those of which the current versions may make use; opened on demand."""
        self._in_flight: dict[GroupUid, PolicyVersion] = {}
        """V_traj of each group in flight, in order of admission."""
        self._num_admitted_at: dict[int, int] = {}
        """V_traj -> groups in flight."""
        self._room: dict[int, int] = {}
        """Answers of `room` since the last change."""
        self._open()

    @property
    def version(self) -> PolicyVersion:
        """The weights that the trainer has; the next update starts from them."""
        return self._version

    @property
    def last_version(self) -> PolicyVersion | None:
        """Weights after which training ends."""
        return self._last

    @property
    def staleness(self) -> int:
        """Most versions by which trained data may be older than the weights."""
        return self._staleness

    @property
    def in_flight(self) -> tuple[GroupUid, ...]:
        """Groups that were promised a slot, in order of admission."""
        return tuple(self._in_flight)

    @property
    def num_in_flight(self) -> int:
        """How many they are."""
        return len(self._in_flight)

    @property
    def num_arrived(self) -> int:
        """Groups that wait for their update."""
        return sum(len(self._buffers[v].occupied) for v in self._window() if v in self._buffers)

    def is_in_flight(self, group: GroupUid) -> bool:
        """Whether a slot was promised to it."""
        return group in self._in_flight

    def admitted_version(self, group: GroupUid) -> PolicyVersion:
        """V_traj of a group in flight."""
        return self._in_flight[group]

    def is_ready(self) -> bool:
        """Whether the update of the current version can be made."""
        return not self._is_consumed and self._version in self._buffers and self._buffers[self._version].is_full

    def room(self, serving: PolicyVersion) -> int:
        """How many groups more could be admitted at this version.

        Of the groups in flight, as many as the largest balance above 0 are redundant, and no more may become so. A group with a
        deadline adds 1 to every balance from the deadline on: so there is room for what these are below the largest.
        """
        room = self._room.get(serving)
        if room is None:
            room = self._room[serving] = self._num_slots_to_promise(serving + self._staleness)
        return room

    def can_reserve(self, serving: PolicyVersion) -> bool:
        """Whether `reserve` would admit a group at this version."""
        return self.room(serving) > 0

    def reserve(self, group: GroupUid, *, serving: PolicyVersion) -> PolicyVersion | None:
        """Admit a group: its V_traj (the version served), or None while no buffer that it may enter has a slot for it."""
        assert group not in self._in_flight, f"group {group} is in flight already"
        assert serving <= self._version + self._is_consumed, f"version {serving} is served before the update {self._version} is made"
        if not self.can_reserve(serving):
            return None
        self._in_flight[group] = serving
        self._num_admitted_at[serving] = self._num_admitted_at.get(serving, 0) + 1
        self._room.clear()
        return serving

    def occupy(self, group: GroupUid, *, oldest: PolicyVersion | None = None) -> PolicyVersion | None:
        """A group has arrived: the buffer that takes it, the earliest that can.

        An earlier buffer takes it if the groups that are still in flight all fit into the slots that remain.

        Args:
            group: In flight.
            oldest: Version of its oldest sampled token. If older than V_traj (an instance served older weights than it was
                thought to), V_traj becomes it.

        Returns:
            None if no buffer can: a redundant group that came last, or one whose oldest token is too old. It is gone then.
        """
        admitted = self._forget(group)
        if oldest is not None:
            admitted = min(admitted, oldest)
        buffer = self._earliest_for(admitted + self._staleness)
        if buffer is None:
            self._spare_redundant()
            return None
        buffer.add(group, admitted)
        self._spare_redundant()
        return buffer.version

    def release(self, group: GroupUid) -> None:
        """Give a promise back: the group was filtered out, failed or was aborted. A redundant group takes its slot, if there is one."""
        self._forget(group)
        self._spare_redundant()

    def consume(self) -> Consumed:
        """Take the ready buffer of the current version; `advance` must follow when the update is made.

        Groups in flight that now have no slot are released: those that only this buffer could take, and then as many as the
        later buffers lack slots for, oldest V_traj first and of these the last admitted.
        """
        assert self.is_ready(), f"buffer {self._version} is not ready"
        buffer = self._buffers.pop(self._version)
        gap = max(self._version - admitted for admitted in buffer.occupied.values())
        assert gap <= self._staleness, f"buffer {self._version} holds data {gap} versions old, bound {self._staleness}"
        self._is_consumed = True
        self._room.clear()
        expired = self._expire()
        return Consumed(version=self._version, admitted=buffer.occupied, max_version_gap=gap, expired=expired)

    def advance(self) -> PolicyVersion:
        """The update is made."""
        assert self._is_consumed, f"buffer {self._version} was not consumed"
        self._version = PolicyVersion(self._version + 1)
        self._is_consumed = False
        self._open()
        self._spare_redundant()
        self._room.clear()
        return self._version

    def state_of(self, version: PolicyVersion) -> BufferState:
        """Of an open buffer, with the groups in flight put into slots as late as their deadlines allow."""
        assert version in self._window() and version in self._buffers, f"buffer {version} is not open"
        buffer = self._buffers[version]
        if buffer.is_full:
            return BufferState.READY_WITH_CAPACITY if buffer.num_redundant > 0 else BufferState.READY
        num_unplaced = 0
        for v in range(self._window()[-1], version, -1):
            num_unplaced += self._num_admitted_at.get(v - self._staleness, 0)
            num_unplaced = max(0, num_unplaced - (self._buffers[v].num_slots_to_promise if v in self._buffers else 0))
        num_unplaced += self._num_admitted_at.get(version - self._staleness, 0)
        return BufferState.PENDING if num_unplaced < buffer.num_slots else BufferState.STUCK

    def snapshot(self) -> LedgerSnapshot:
        """What a checkpoint keeps."""
        occupied = {self._buffers[v].version: dict(self._buffers[v].occupied) for v in self._window() if v in self._buffers}
        version = PolicyVersion(self._version + self._is_consumed)
        return LedgerSnapshot(version=version, occupied={v: groups for v, groups in occupied.items() if groups}, in_flight=self.in_flight)

    @classmethod
    def restore(
        cls,
        snapshot: LedgerSnapshot,
        *,
        staleness: int,
        groups_per_buffer: int,
        redundant_groups: int = 0,
        last_version: PolicyVersion | None = None,
    ) -> StalenessLedger:
        """A ledger with the arrived groups of a snapshot, which these settings admit; its groups in flight are to be issued again."""
        ledger = cls(
            staleness=staleness,
            groups_per_buffer=groups_per_buffer,
            version=snapshot.version,
            redundant_groups=redundant_groups,
            last_version=last_version,
        )
        for version, groups in snapshot.occupied.items():
            assert version in ledger._buffers, f"the snapshot has groups for the update {version}, which is never made"
            for group, admitted in groups.items():
                assert version - admitted <= staleness, f"group {group} of version {admitted} is too old for buffer {version}"
                ledger._buffers[version].add(group, admitted)
        ledger._spare_redundant()
        return ledger

    def _open(self) -> None:
        """Have a buffer for every version that a group admitted now may be trained at."""
        for v in range(self._version, self._version + self._staleness + 1):
            if v not in self._buffers and (self._last is None or v < self._last):
                self._buffers[v] = Buffer(PolicyVersion(v), quota=self._quota, capacity=self._capacity)

    def _window(self) -> range:
        """Deadlines that a group in flight may have: one further after `consume`, when the new weights may be served already."""
        return range(self._version + self._is_consumed, self._version + self._staleness + 2)

    def _balances(self, *, to_promise: bool) -> list[int]:
        """For each v of the window: groups in flight whose deadline is v or earlier, less the slots in buffers up to v.

        The groups fit if no balance is above 0 (Hall's condition for deadlines).
        """
        balance, balances = 0, []
        buffers, num_admitted_at, staleness = self._buffers, self._num_admitted_at, self._staleness
        for v in self._window():
            if v - staleness in num_admitted_at:
                balance += num_admitted_at[v - staleness]
            if v in buffers:
                balance -= buffers[v].num_slots_to_promise if to_promise else buffers[v].num_slots
            balances.append(balance)
        return balances

    def _num_slots_to_promise(self, deadline: int) -> int:
        first = deadline - self._window()[0]
        if first < 0:
            return 0
        balances = self._balances(to_promise=True)
        return max(0, max([0, *balances[:first]]) - max(balances[first:]))

    def _earliest_for(self, deadline: int) -> Buffer | None:
        """The earliest buffer up to `deadline` that one more arrived group may enter, so that those in flight still fit."""
        found = None
        for v, balance in zip(reversed(self._window()), reversed(self._balances(to_promise=False)), strict=True):
            if balance >= 0:
                break
            if v <= deadline and v in self._buffers and not self._buffers[v].is_full:
                found = self._buffers[v]
        return found

    def _spare_redundant(self) -> None:
        """Have no more redundant groups than must be: those that fit elsewhere are not. The next update's are spared first."""
        redundant = [buffer for buffer in self._buffers.values() if buffer.num_redundant > 0]
        for buffer in redundant:
            start = buffer.version - self._window()[0]
            buffer.num_redundant -= min(buffer.num_redundant, -max(self._balances(to_promise=False)[start:]))

    def _forget(self, group: GroupUid) -> PolicyVersion:
        admitted = self._in_flight.pop(group)
        self._num_admitted_at[admitted] -= 1
        if self._num_admitted_at[admitted] == 0:
            del self._num_admitted_at[admitted]
        self._room.clear()
        return admitted

    def _expire(self) -> tuple[GroupUid, ...]:
        num_late = sum(num for admitted, num in self._num_admitted_at.items() if admitted + self._staleness <= self._version)
        lacking = max(self._balances(to_promise=False))
        if num_late == 0 and lacking <= 0:
            return ()
        # Balances above count only groups whose deadline lies ahead, so the two numbers add up.
        by_age = sorted(reversed(self._in_flight), key=self._in_flight.__getitem__)
        expired = tuple(by_age[: num_late + max(0, lacking)])
        for group in expired:
            self._forget(group)
        self._spare_redundant()
        return expired
