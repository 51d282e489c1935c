"""Groups that wait at a full instance while another has room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from psrl.staleness.instances import Instance
from psrl.types import GroupUid, PolicyVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A group shall go on at another instance."""

    group: GroupUid
    source: int
    target: int


def next_moves(instances: Sequence[Instance], *, admitted_version: Callable[[GroupUid], PolicyVersion]) -> list[Move]:
    """At most one move from each instance at which turns wait, to the one with the fewest episodes at which none do.

    The group admitted last moves: it has the least to compute again, and its turns have the lowest priority. Its target must
    serve its V_traj or newer, so that a move never makes its tokens older, and must have no more episodes than the source after
    the move: so no group is moved back, whatever the reports say.
    """
    live = [each for each in instances if each.is_up and not each.is_syncing]
    sources = [each for each in live if each.load is not None and each.load.num_waiting > 0]
    targets = [each for each in live if each.load is not None and each.load.num_waiting == 0]
    moves = []
    for source in sources:
        targets.sort(key=lambda each: each.num_episodes)
        move = _move_from(source, targets, admitted_version)
        if move is not None:
            moves.append(move)
            targets = [each for each in targets if each.index != move.target]
    return moves


def _move_from(source: Instance, targets: Sequence[Instance], admitted_version: Callable[[GroupUid], PolicyVersion]) -> Move | None:
    for group, num_episodes in reversed(source.groups.items()):
        for target in targets:
            if target.num_episodes + num_episodes > source.num_episodes - num_episodes:
                break
            if target.version >= admitted_version(group):
                return Move(group=group, source=source.index, target=target.index)
    return None
