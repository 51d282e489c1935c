"""The driver of a simulated run: `psrl.staleness.Coordinator` decides, the models take their time.

It follows the loops of `runtime/loops`: feed (admit while there is room, groups that are issued again first), assemble (an arrived group
is trained on or left out), train (consume a ready buffer, update, push, advance), sync (each instance when the coordinator says so) and
tend (loads, moves, groups that take too long). Validation and checkpoints are left out.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from psrl.errors import TooManyFailuresError
from psrl.simulation.cluster import SimulatedCluster
from psrl.simulation.events import EventQueue
from psrl.simulation.instance import Instance
from psrl.simulation.report import Marks, SimulationReport, Totals, report_of
from psrl.simulation.rollout import GroupEnd, Rollout
from psrl.simulation.weights import InstanceSyncs
from psrl.simulation.workload import Workload, rng_of
from psrl.staleness import Admission, Coordinator, CoordinatorSettings, StalenessLedger, SyncOrder
from psrl.types import GroupUid, PolicyVersion

TICK_S = 0.5
"""How often the tend loop of a run looks."""
MOST_EVENTS_PER_STEP = 2_000_000
"""Without an update for so long, none will come: every group is dropped, or every episode fails."""
NUM_KEPT = 2
"""Versions that a parameter server holds."""
START = PolicyVersion(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrived:
    """A group that waits for its update."""

    version: PolicyVersion
    """V_traj."""
    num_tokens: float


def simulate(cluster: SimulatedCluster, workload: Workload, *, num_steps: int, num_warmup: int) -> SimulationReport:
    """Play `num_steps` updates and measure those after the first `num_warmup`.

    The same arguments give the same report, and other settings of `cluster.psrl` meet the same episodes.

    Raises:
        TooManyFailuresError: No update comes any more.
    """
    assert 0 <= num_warmup < num_steps, f"{num_warmup} of {num_steps} steps warm up"
    return Simulation(cluster, workload).run(num_steps=num_steps, num_warmup=num_warmup)


class Simulation:
    """One run."""

    def __init__(self, cluster: SimulatedCluster, workload: Workload) -> None:
        self._cluster, self._workload, psrl = cluster, workload, cluster.psrl
        self._events = EventQueue()
        self._instances = [
            Instance(
                self._events,
                num_slots=cluster.slots_per_instance,
                pace=workload.pace,
                version=START,
                num_replicas=cluster.replicas_per_instance,
            )
            for _ in range(cluster.num_instances)
        ]
        ledger = StalenessLedger(
            staleness=psrl.staleness, groups_per_buffer=cluster.groups_per_buffer, redundant_groups=psrl.redundant_groups, version=START
        )
        settings = CoordinatorSettings.of(psrl, max_groups_in_flight=cluster.max_groups_in_flight, seed=cluster.seed)
        self._coordinator = Coordinator(settings, ledger, num_instances=cluster.num_instances)
        self._rollout = Rollout(
            self._events,
            self._instances,
            num_workers=cluster.num_workers,
            episodes_per_worker=cluster.episodes_per_worker,
            num_needed=psrl.rollout_n,
            episode_timeout_s=cluster.episode_timeout_s,
            request_timeout_s=cluster.request_timeout_s,
            max_episode_retries=psrl.max_episode_retries,
            failing_share=workload.failures.episode_share,
            seed=cluster.seed,
            on_end=self._group_ended,
        )
        self._syncs = InstanceSyncs(
            self._events,
            self._instances,
            partial_rollout=psrl.partial_rollout,
            workload=workload,
            seed=cluster.seed,
            on_synced=self._synced,
        )
        self._num_new = 0
        self._reissues: deque[GroupUid] = deque()
        self._admissions: dict[GroupUid, Admission] = {}
        self._arrived: dict[GroupUid, Arrived] = {}
        self._fates: Counter[str] = Counter()
        self._marks: list[Marks] = []
        self._totals = Totals()
        self._is_training = False
        self._is_settling = False
        self._train_rng, self._push_rng = rng_of(cluster.seed, "train"), rng_of(cluster.seed, "push")
        self._rest_rng = rng_of(cluster.seed, "rest")
        self._equal_rng = rng_of(cluster.seed, "equal rewards")
        self._deaths = rng_of(cluster.seed, "deaths")

    def run(self, *, num_steps: int, num_warmup: int) -> SimulationReport:
        """See `simulate`; once."""
        for index in range(len(self._instances)):
            self._coordinator.instance_is_up(index, START)
            self._plan_death_of_instance(index)
        for index in range(len(self._rollout.workers)):
            self._plan_death_of_worker(index)
        psrl = self._cluster.psrl
        if psrl.proactive_filter.action != "none" or psrl.routing.migrate or psrl.sync.policy in ("throughput", "kv_cache"):
            self._events.after(TICK_S, self._tend)
        self._mark()
        self._changed()
        num_quiet = 0
        while len(self._marks) <= num_steps:
            num_before, num_quiet = len(self._marks), num_quiet + 1
            assert self._events.step(), f"nothing is to come, outstanding: {self._coordinator.outstanding(self._events.now_s)}"
            if len(self._marks) > num_before:
                num_quiet = 0
            if num_quiet > MOST_EVENTS_PER_STEP:
                raise TooManyFailuresError(f"no update after {num_quiet} events: {self._standing()}")
        return report_of(
            self._cluster,
            self._workload,
            marks=self._marks[num_warmup:],
            fates=dict(self._fates),
            episodes={**self._rollout.counts, "in flight": self._rollout.num_open},
            num_in_flight=len(self._admissions),
            num_waiting=len(self._arrived),
            num_late_turns=self._rollout.num_late_turns,
        )

    # ------------------------------------------------------------ feed

    def _changed(self) -> None:
        """See what can be done, once everything that happens at this moment has happened."""
        if not self._is_settling:
            self._is_settling = True
            self._events.after(0.0, self._settle)

    def _settle(self) -> None:
        self._is_settling = False
        self._train_if_ready()
        for order in self._coordinator.due_syncs():
            self._begin_sync(order)
        while self._admit():
            pass

    def _admit(self) -> bool:
        group = self._reissues[0] if self._reissues else GroupUid(f"g{self._num_new:07d}")
        admission = self._coordinator.admit(group, now_s=self._events.now_s, prompt=group)
        if admission is None:
            return False
        if self._reissues:
            self._reissues.popleft()
        else:
            self._num_new += 1
        self._fates["admitted"] += 1
        self._admissions[group] = admission
        plans = self._workload.episodes.draw(rng_of(self._cluster.seed, group, admission.attempt), self._cluster.episodes_per_group)
        self._rollout.play(admission, plans)
        return True

    # ------------------------------------------------------------ assemble

    def _group_ended(self, end: GroupEnd) -> None:
        psrl = self._cluster.psrl
        smallest = psrl.min_group_size if psrl.incomplete_groups == "allow_partial" else psrl.rollout_n
        admission = self._admissions[end.group]
        if end.num_judged < smallest:
            self._leave_out(end.group, "dropped", may_come_again=False)
        elif self._cluster.drops_equal_rewards and self._equal_rng.random() < self._workload.equal_share:
            self._leave_out(end.group, "filtered", may_come_again=False)
        elif self._coordinator.arrive(end.group, oldest=end.oldest) is None:
            del self._admissions[end.group]
            self._issue_again(end.group, "surplus", may_come_again=True)
        else:
            del self._admissions[end.group]
            version = admission.version if end.oldest is None else min(admission.version, end.oldest)
            self._arrived[end.group] = Arrived(version=version, num_tokens=end.num_tokens)
            self._totals.useful_slot_s += end.slot_s
        self._changed()

    def _leave_out(self, group: GroupUid, fate: str, *, may_come_again: bool) -> None:
        del self._admissions[group]
        self._coordinator.release(group)
        self._issue_again(group, fate, may_come_again=may_come_again)

    def _issue_again(self, group: GroupUid, fate: str, *, may_come_again: bool) -> None:
        if may_come_again and self._coordinator.reissue(group):
            self._reissues.append(group)
            fate = "issued again"
        self._fates[fate] += 1

    # ------------------------------------------------------------ train

    def _train_if_ready(self) -> None:
        if self._is_training or not self._coordinator.ledger.is_ready():
            return
        self._is_training = True
        consumed = self._coordinator.consume()
        for group in consumed.expired:
            del self._admissions[group]
            self._rollout.cancel(group)
            self._issue_again(group, "surplus", may_come_again=True)
        for group in consumed.groups:
            arrived = self._arrived.pop(group)
            self._fates["trained"] += 1
            self._totals.gaps[consumed.version - arrived.version] += 1
            self._totals.num_tokens += arrived.num_tokens
        train_s, push_s = self._workload.train.draw(self._train_rng), self._workload.push.draw(self._push_rng)
        self._totals.training_s += train_s
        self._totals.push_s += push_s
        self._events.after(train_s + push_s, self._updated)

    def _updated(self) -> None:
        self._coordinator.published(self._coordinator.advance())
        self._mark()
        self._events.after(self._workload.rest.draw(self._rest_rng), self._rested)
        self._changed()

    def _rested(self) -> None:
        self._is_training = False
        self._changed()

    def _mark(self) -> None:
        for instance in self._instances:
            instance.read_clock()
        self._totals.busy_slot_s = sum(instance.busy_slot_s for instance in self._instances)
        self._totals.paused_s = sum(instance.paused_s for instance in self._instances)
        self._totals.down_s = sum(instance.down_s for instance in self._instances)
        self._marks.append(Marks.of(self._events.now_s, self._totals))

    # ------------------------------------------------------------ sync and tend

    def _begin_sync(self, order: SyncOrder) -> None:
        self._coordinator.sync_began(order.instance)
        self._syncs.begin(order.instance, order.version)

    def _synced(self, index: int, version: PolicyVersion) -> None:
        self._totals.num_syncs += 1
        self._coordinator.synced(index, version)
        self._changed()

    def _tend(self) -> None:
        self._events.after(TICK_S, self._tend)
        for index, instance in enumerate(self._instances):
            if instance.is_up:
                self._coordinator.observe(index, instance.load(tokens_per_work=self._workload.tokens_per_work))
        for move in self._coordinator.due_moves():
            self._rollout.groups[move.group].move(move.target)
            self._coordinator.moved(move.group, move.target)
        for overdue in self._coordinator.overdue(self._events.now_s):
            if overdue.action == "truncate":
                self._rollout.groups[overdue.group].truncate()
            else:
                self._rollout.cancel(overdue.group)
                self._leave_out(overdue.group, "null", may_come_again=overdue.action == "retry")
        self._changed()

    # ------------------------------------------------------------ failures

    def _plan_death_of_instance(self, index: int) -> None:
        if rate := self._workload.failures.replica_per_s:
            self._events.after(self._deaths.expovariate(rate), lambda: self._instance_dies(index))

    def _instance_dies(self, index: int) -> None:
        self._syncs.forget(index)
        self._coordinator.instance_is_down(index)
        self._rollout.instance_died(index)
        self._events.after(self._workload.failures.restart_s, lambda: self._instance_comes_up(index))
        self._changed()

    def _instance_comes_up(self, index: int) -> None:
        latest, served = self._coordinator.latest, self._instances[index].version
        is_held = served == START or latest - served < NUM_KEPT
        version = served if is_held else latest
        self._instances[index].come_up(version)
        self._coordinator.instance_is_up(index, version)
        self._rollout.instance_is_up()
        self._plan_death_of_instance(index)
        self._changed()

    def _plan_death_of_worker(self, index: int) -> None:
        if rate := self._workload.failures.worker_per_s:
            self._events.after(self._deaths.expovariate(rate), lambda: self._worker_dies(index))

    def _worker_dies(self, index: int) -> None:
        worker = self._rollout.workers[index]
        self._rollout.worker_died(worker)

        def come_up() -> None:
            worker.come_up()
            self._plan_death_of_worker(index)

        self._events.after(self._workload.failures.restart_s, come_up)

    def _standing(self) -> str:
        fates = ", ".join(f"{fate} {count}" for fate, count in sorted(self._fates.items()))
        return f"{fates}; {len(self._admissions)} groups in flight"
