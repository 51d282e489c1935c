"""Where a group may start, and what is said of one that does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psrl.staleness.instances import Instance
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


def within_share(views: Sequence[Instance], *, num_awaited: int, num_groups: int, episodes_per_group: int) -> list[Instance]:
    """Instances that do not yet play their share, as long as others take weights and will want theirs.

    Without this, the first instance that is back from a sync would take all the room there is, and the others would idle until the
    next update, and in every update after it.

    Args:
        views: Instances that may be given a group.
        num_awaited: Others that will be open soon; with none, nobody is passed over.
        num_groups: In flight, and those for which there is room.
        episodes_per_group: As admitted.

    Example:
        2 instances, one of them syncing, room for 5 groups of 8 episodes: the other takes 5 // 2 = 2 of them (16 episodes) and
        the remaining 3 wait; once both are open, nobody is passed over, and balance gives 3 and 2.
    """
    if num_awaited == 0:
        return list(views)
    share = max(1, num_groups // (len(views) + num_awaited))
    return [view for view in views if view.num_episodes < share * episodes_per_group]
