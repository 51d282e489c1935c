"""How fast a run could be if no group ever waited for another one: what staleness without a bound would reach.

Each part has a rate that it cannot pass: slots of the engines, places of the agent workers, groups in flight, the trainer. The bound is
the least of them. A part's rate is its number of servers over the mean seconds for which a group holds them; these means are taken over
groups drawn from the workload, played without any queue, and cut where a group ends (its last needed member, so what redundant members
cost is in it).
"""

from __future__ import annotations

from dataclasses import dataclass

from psrl.simulation.cluster import SimulatedCluster
from psrl.simulation.workload import EpisodePlan, Workload, rng_of

NUM_GROUPS = 2000
"""Drawn for the means."""


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
    slot_s = 1.0 / workload.pace.rate(cluster.slots_per_instance)
    held = [
        _held(workload.episodes.draw(rng_of(cluster.seed, f"bound {index}"), cluster.episodes_per_group), cluster.psrl.rollout_n, slot_s)
        for index in range(NUM_GROUPS)
    ]
    engine_s, place_s, group_s = (sum(column) / NUM_GROUPS for column in zip(*held, strict=True))
    failures = workload.failures
    kept = 1.0 - (workload.equal_share if cluster.drops_equal_rewards else 0.0)
    played = kept * (1.0 - failures.episode_share)
    replicas_up, workers_up = (1.0 / (1.0 + rate * failures.restart_s) for rate in (failures.replica_per_s, failures.worker_per_s))
    return Bound(
        engines=_rate(cluster.num_slots * replicas_up, engine_s) * played,
        workers=_rate(cluster.num_places * workers_up, place_s) * played,
        in_flight=_rate(cluster.max_groups_in_flight, group_s) * played,
        trainer=_rate(cluster.groups_per_buffer, workload.train.mean() + workload.push.mean() + workload.rest.mean()),
        rollout_n=cluster.psrl.rollout_n,
    )


def _held(plans: list[EpisodePlan], num_needed: int, slot_s: float) -> tuple[float, float, float]:
    """Seconds of slots, of places and of the group itself, played alone."""
    totals = [sum(plan.work) * slot_s + sum(plan.tools_s) + plan.reward_s for plan in plans]
    end_s = sorted(totals)[num_needed - 1]
    engine_s = sum(_in_slots_until(end_s, plan, slot_s) for plan in plans)
    return engine_s, sum(min(total, end_s) for total in totals), end_s


def _in_slots_until(end_s: float, plan: EpisodePlan, slot_s: float) -> float:
    """Seconds of `plan` in a slot before it is cut at `end_s`."""
    now_s = in_slots_s = 0.0
    for work, tool_s in zip(plan.work, (*plan.tools_s, 0.0), strict=True):
        turn_s = min(work * slot_s, max(0.0, end_s - now_s))
        in_slots_s += turn_s
        now_s += turn_s + tool_s
    return in_slots_s


def _rate(num_servers: float, seconds: float) -> float:
    return num_servers / seconds if seconds > 0 else float("inf")
