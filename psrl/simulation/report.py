"""What a simulation measured, over the steps after its warm-up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from psrl.simulation.bound import Bound, bound_of
from psrl.simulation.cluster import SimulatedCluster
from psrl.simulation.workload import Workload


@dataclass(kw_only=True, slots=True)
class Totals:
    """Sums since the beginning."""

    gaps: Counter[int] = field(default_factory=Counter)
    """Groups trained on, by V_buf - V_traj."""
    num_tokens: float = 0.0
    """Sampled in them."""
    useful_slot_s: float = 0.0
    """Seconds for which turns of groups that a buffer took were in a slot, counted when it took them."""
    busy_slot_s: float = 0.0
    """Seconds for which any turn was in a slot."""
    paused_s: float = 0.0
    """Of all instances."""
    down_s: float = 0.0
    training_s: float = 0.0
    push_s: float = 0.0
    num_syncs: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """The sums when an update was published."""

    at_s: float
    totals: Totals

    @classmethod
    def of(cls, at_s: float, totals: Totals) -> Marks:
        """As they are now."""
        return cls(at_s=at_s, totals=replace(totals, gaps=Counter(totals.gaps)))


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationReport:
    """One simulated run. Shares are of the time after the warm-up."""

    staleness: int
    num_steps: int
    """Measured ones."""
    seconds: float
    """Virtual, of these steps."""
    step_s: float
    episodes_per_s: float
    """Trained on."""
    groups_per_s: float
    tokens_per_s: float
    """Of episodes trained on; 0 where the workload has no tokens."""
    engines_busy: float
    """Share of the slots' time in which a turn was in them."""
    engines_useful: float
    """Share of the slots' time that went into what was trained on."""
    engines_paused: float
    engines_down: float
    trainer_training: float
    trainer_pushing: float
    trainer_waiting: float
    """For data."""
    staleness_mean: float
    staleness_shares: dict[int, float]
    """Share of the trained groups by V_buf - V_traj."""
    syncs_per_step: float
    """Of one instance."""
    bound_episodes_per_s: float
    """For infinite staleness."""
    bound_by: str
    bound_share: float
    """How much of it was reached."""
    groups: dict[str, int]
    """Of the whole run, by fate; `admitted` counts every issue."""
    episodes: dict[str, int]
    """Of the whole run: issued ones were judged, cancelled, given up, or are in flight; `infra_error` counts plays that failed."""
    groups_in_flight: int
    """At the end."""
    groups_waiting: int
    """At the end: arrived, and not trained on yet."""
    late_turns: int
    """Of the whole run: turns that were not answered within `request_timeout_s`. A run cuts them; here they went on."""
    request_timeout_s: float
    bound: Bound

    def as_json(self) -> dict[str, Any]:
        """Plain numbers and texts."""
        return asdict(self)


def report_of(
    cluster: SimulatedCluster,
    workload: Workload,
    *,
    marks: Sequence[Marks],
    fates: dict[str, int],
    episodes: dict[str, int],
    num_in_flight: int,
    num_waiting: int,
    num_late_turns: int,
) -> SimulationReport:
    """Between the first and the last of `marks`."""
    first, last = marks[0], marks[-1]
    seconds, num_steps = last.at_s - first.at_s, len(marks) - 1
    before, after = first.totals, last.totals
    gaps = after.gaps - before.gaps
    num_groups = gaps.total()
    slot_s = seconds * cluster.num_slots
    training, pushing = ((after.training_s - before.training_s) / seconds, (after.push_s - before.push_s) / seconds)
    bound = bound_of(cluster, workload)
    groups_per_s = num_groups / seconds
    return SimulationReport(
        staleness=cluster.psrl.staleness,
        num_steps=num_steps,
        seconds=seconds,
        step_s=seconds / num_steps,
        episodes_per_s=groups_per_s * cluster.psrl.rollout_n,
        groups_per_s=groups_per_s,
        tokens_per_s=(after.num_tokens - before.num_tokens) / seconds,
        engines_busy=(after.busy_slot_s - before.busy_slot_s) / slot_s,
        engines_useful=(after.useful_slot_s - before.useful_slot_s) / slot_s,
        engines_paused=(after.paused_s - before.paused_s) / (seconds * cluster.num_instances),
        engines_down=(after.down_s - before.down_s) / (seconds * cluster.num_instances),
        trainer_training=training,
        trainer_pushing=pushing,
        trainer_waiting=max(0.0, 1.0 - training - pushing),
        staleness_mean=sum(gap * count for gap, count in gaps.items()) / num_groups,
        staleness_shares={gap: gaps[gap] / num_groups for gap in range(max(gaps) + 1)},
        syncs_per_step=(after.num_syncs - before.num_syncs) / (num_steps * cluster.num_instances),
        bound_episodes_per_s=bound.episodes_per_s,
        bound_by=bound.limiting,
        bound_share=groups_per_s / bound.groups_per_s,
        groups=fates,
        episodes=episodes,
        groups_in_flight=num_in_flight,
        groups_waiting=num_waiting,
        late_turns=num_late_turns,
        request_timeout_s=cluster.request_timeout_s,
        bound=bound,
    )
