"""Arrived groups of a checkpoint under other settings than those that placed them.

A run may be resumed with another staleness or another last step. What still fits stays where it is; otherwise all arrived groups are
placed anew, oldest V_traj first and each in the earliest buffer with room, which keeps as many as can be kept (jobs of equal length
with deadlines). The others have no buffer any more: their tasks are issued again.
"""

from __future__ import annotations

from psrl.staleness.ledger import LedgerSnapshot
from psrl.types import GroupUid, PolicyVersion


def refit(
    snapshot: LedgerSnapshot, *, staleness: int, groups_per_buffer: int, last_version: PolicyVersion
) -> tuple[LedgerSnapshot, tuple[GroupUid, ...]]:
    """(the snapshot under these settings, arrived groups that no buffer takes any more).

    Example:
        Version 5, buffer 5 holds a group of V_traj 3 and buffer 6 one of V_traj 5. Under staleness 0 the first is too old, and the
        second may only be trained on now: buffer 5 holds it, and the first comes back.
    """
    if _fits(snapshot, staleness=staleness, groups_per_buffer=groups_per_buffer, last_version=last_version):
        return snapshot, ()
    arrived = [(admitted, group) for groups in snapshot.occupied.values() for group, admitted in groups.items()]
    occupied: dict[PolicyVersion, dict[GroupUid, PolicyVersion]] = {}
    without_buffer = []
    for admitted, group in sorted(arrived):
        for v in range(snapshot.version, min(admitted + staleness + 1, last_version)):
            groups = occupied.setdefault(PolicyVersion(v), {})
            if len(groups) < groups_per_buffer:
                groups[group] = admitted
                break
        else:
            without_buffer.append(group)
    placed = {version: groups for version, groups in occupied.items() if groups}
    return LedgerSnapshot(version=snapshot.version, occupied=placed, in_flight=snapshot.in_flight), tuple(without_buffer)


def _fits(snapshot: LedgerSnapshot, *, staleness: int, groups_per_buffer: int, last_version: PolicyVersion) -> bool:
    return all(
        version < last_version and len(groups) <= groups_per_buffer and version - min(groups.values()) <= staleness
        for version, groups in snapshot.occupied.items()
    )
