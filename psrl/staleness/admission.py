"""What is said of a group that may start."""

from __future__ import annotations

from dataclasses import dataclass

from psrl.types import GroupUid, PolicyVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """A group that may start."""

    group: GroupUid
    version: PolicyVersion
    """V_traj: the oldest version that its instances serve."""
    instances: tuple[int, ...]
    """One for each of its episodes, redundant ones included."""
    attempt: int
    """0, and one more each time that it is issued again."""
