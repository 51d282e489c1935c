"""How fast a run could be if no group ever waited for another one: what staleness without a bound would reach.

Each part has a rate that it cannot pass: slots of the engines, places of the agent workers, groups in flight, the trainer. The bound is
the least of them. A part's rate is its number of servers over the mean seconds for which a group holds them; these means are taken over
groups drawn from the workload, played without any queue, and cut where a group ends (its last needed member, so what redundant members
cost is in it).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from psrl.simulation.cluster import SimulatedCluster
from psrl.simulation.workload import EpisodePlan, Workload, rng_of

NUM_GROUPS = 2000
"""Drawn for the means."""
NUM_SEARCHED = 500
"""Of them, those by which the pace is searched."""
NUM_ROUNDS = 5
"""Of that search."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bound:
    """Groups per second that each part allows."""

    engines: float
    workers: float
    in_flight: float
    trainer: float
    rollout_n: int

    @property
    def limiting(self) -> str:
        """The part with the least rate."""
        rates = {"engines": self.engines, "workers": self.workers, "groups in flight": self.in_flight, "trainer": self.trainer}
        return min(rates, key=lambda part: rates[part])

    @property
    def groups_per_s(self) -> float:
        """The least rate."""
        return min(self.engines, self.workers, self.in_flight, self.trainer)

    @property
    def episodes_per_s(self) -> float:
        """Episodes trained on per second."""
        return self.groups_per_s * self.rollout_n


def bound_of(cluster: SimulatedCluster, workload: Workload) -> Bound:
    """The bound for infinite staleness; infinite rates where a part takes no time."""
    played_alone = PlayedAlone(cluster, workload)
    failures = workload.failures
    kept = 1.0 - (workload.equal_share if cluster.drops_equal_rewards else 0.0)
    played = kept * (1.0 - failures.episode_share)
    replicas_up, workers_up = (1.0 / (1.0 + rate * failures.restart_s) for rate in (failures.replica_per_s, failures.worker_per_s))
    full = workload.pace.seconds(cluster.slots_per_replica)
    return Bound(
        engines=_rate(cluster.num_slots * replicas_up, played_alone.held(full).engine_s) * played,
        workers=_rate(cluster.num_places * workers_up, played_alone.place_s()) * played,
        in_flight=_rate(cluster.max_groups_in_flight, played_alone.group_s()) * played,
        trainer=_rate(cluster.groups_per_buffer, workload.train.mean() + workload.push.mean() + workload.rest.mean()),
        rollout_n=cluster.psrl.rollout_n,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """Mean seconds for which a group holds something."""

    engine_s: float
    """Slots of engines, the sum over its members."""
    place_s: float
    """Places of agent workers, the sum over its members."""
    group_s: float
    """From its beginning to its end."""


class PlayedAlone:
    """Groups drawn from the workload, played without any queue, at a given pace.

    Where decoding slows down with the number of running turns, the pace of a part that is the limit is that of the turns which run
    then, and not of full slots. Their mean number follows from the pace, and the pace from it (Little's law); work done per second is
    concave in the number of turns, so the mean number gives a bound. The search begins at the fastest pace and slows down towards
    the answer, so that it may end at any time.
    """

    def __init__(self, cluster: SimulatedCluster, workload: Workload) -> None:
        self._cluster, self._pace = cluster, workload.pace
        self._groups = [
            workload.episodes.draw(rng_of(cluster.seed, f"bound {index}"), cluster.episodes_per_group) for index in range(NUM_GROUPS)
        ]

    def held(self, work_s: float, num_groups: int = NUM_GROUPS) -> Held:
        """At `work_s` seconds for a unit of work."""
        held = [_held(plans, self._cluster.psrl.rollout_n, work_s) for plans in self._groups[:num_groups]]
        engine_s, place_s, group_s = (sum(column) / num_groups for column in zip(*held, strict=True))
        return Held(engine_s=engine_s, place_s=place_s, group_s=group_s)

    def place_s(self) -> float:
        """Of places, when all of them are taken."""
        return self._held_at_its_pace(self._cluster.num_places, lambda held: held.place_s).place_s

    def group_s(self) -> float:
        """Of a group, when as many are in flight as may be."""
        return self._held_at_its_pace(self._cluster.max_groups_in_flight, lambda held: held.group_s).group_s

    def _held_at_its_pace(self, num_servers: int, seconds: Callable[[Held], float]) -> Held:
        num_running = 1.0
        for _ in range(NUM_ROUNDS if self._pace.per_running_s > 0 else 0):
            held = self.held(self._pace.seconds(num_running), NUM_SEARCHED)
            num_turns = num_servers * held.engine_s / seconds(held) if held.engine_s > 0 else 0.0
            num_running = max(num_running, min(self._cluster.slots_per_replica, num_turns / self._cluster.num_replicas))
        return self.held(self._pace.seconds(num_running))


def _held(plans: list[EpisodePlan], num_needed: int, work_s: float) -> tuple[float, float, float]:
    """Seconds of slots, of places and of the group itself, played alone."""
    totals = [sum(plan.work) * work_s + sum(plan.tools_s) + plan.reward_s for plan in plans]
    end_s = sorted(totals)[num_needed - 1]
    engine_s = sum(_in_slots_until(end_s, plan, work_s) for plan in plans)
    return engine_s, sum(min(total, end_s) for total in totals), end_s


def _in_slots_until(end_s: float, plan: EpisodePlan, work_s: float) -> float:
    """Seconds of `plan` in a slot before it is cut at `end_s`."""
    now_s = in_slots_s = 0.0
    for work, tool_s in zip(plan.work, (*plan.tools_s, 0.0), strict=True):
        turn_s = min(work * work_s, max(0.0, end_s - now_s))
        in_slots_s += turn_s
        now_s += turn_s + tool_s
    return in_slots_s


def _rate(num_servers: float, seconds: float) -> float:
    return num_servers / seconds if seconds > 0 else float("inf")
