"""Whether a group may start now, and at which instances."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from psrl.staleness.instances import Instance
from psrl.staleness.ledger import StalenessLedger
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


def open_instances(instances: Sequence[Instance], ledger: StalenessLedger, *, is_due: Callable[[Instance], bool]) -> list[Instance]:
    """Those that may be given a group: up, neither taking newer weights nor about to, and at a version that the ledger has a slot for."""
    can_reserve = ledger.can_reserve
    return [each for each in instances if each.is_up and not each.is_syncing and can_reserve(each.version) and not is_due(each)]
