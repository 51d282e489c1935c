"""A world around the coordinator that does everything a run can do, in any order, and keeps its own books.

Every action is chosen by the next byte of a schedule, so that hypothesis can make schedules and shorten those that fail. The books
(what is in flight, what arrived, who serves what) are kept without asking the coordinator, and every answer is held against them.
"""

from collections import deque
from dataclasses import dataclass, field

from psrl.config.asynchrony import ProactiveFilterConfig, RoutingConfig, SyncConfig
from psrl.staleness import Coordinator, CoordinatorSettings, InstanceLoad, OverdueAction, StalenessLedger

POLICIES = ("eager", "request_num", "throughput", "kv_cache", "starvation")
ROUTERS = ("random", "round_robin", "request_num_balance", "cache_aware")


@dataclass(frozen=True, kw_only=True)
class WorldSettings:
    """One setting of everything that the coordinator depends on."""

    staleness: int = 0
    groups_per_buffer: int = 2
    redundant_groups: int = 0
    num_steps: int = 6
    num_instances: int = 2
    max_groups_in_flight: int = 100
    max_reissues: int = 1
    policy: str = "eager"
    router: str = "request_num_balance"
    sticky: str = "group"
    action: str = "none"


class ScheduleOver(Exception):
    """The bytes are used up."""


@dataclass
class World:
    """The rest of the program, played by a schedule."""

    settings: WorldSettings
    schedule: bytes
    position: int = 0
    now_s: float = 0.0
    num_new: int = 0
    again: deque = field(default_factory=deque)
    """Groups to be issued again: (uid, attempt)."""
    in_flight: dict = field(default_factory=dict)
    """uid -> (V_traj, attempt)."""
    arrived: dict = field(default_factory=dict)
    """uid -> (buffer, version that counts)."""
    trained: list = field(default_factory=list)
    """One list of uids per update."""
    dropped: set = field(default_factory=set)
    serves: list = field(default_factory=list)
    """Version of each instance, None while it is down."""
    syncing: dict = field(default_factory=dict)
    """Instance -> version that it takes."""
    published: int = 0
    unpublished: deque = field(default_factory=deque)
    is_training: bool = False
    held: int | None = None
    num_wasted: int = 0
    """Groups that found no buffer although their tokens were as young as promised."""

    def __post_init__(self):
        s = self.settings
        self.ledger = StalenessLedger(
            staleness=s.staleness,
            groups_per_buffer=s.groups_per_buffer,
            version=0,
            redundant_groups=s.redundant_groups,
            last_version=s.num_steps,
        )
        chosen = CoordinatorSettings(
            episodes_per_group=2,
            max_groups_in_flight=s.max_groups_in_flight,
            max_reissues=s.max_reissues,
            sync=SyncConfig(policy=s.policy),
            routing=RoutingConfig(policy=s.router, sticky=s.sticky, migrate=s.sticky == "group"),
            proactive_filter=ProactiveFilterConfig(action=s.action, time_limit_s=10.0, max_per_step=2),
            seed=1,
        )
        self.coordinator = Coordinator(chosen, self.ledger, num_instances=s.num_instances)
        self.serves = [0] * s.num_instances
        for index in range(s.num_instances):
            self.coordinator.instance_is_up(index, 0)

    # -- the schedule

    def choose(self, number: int) -> int:
        """0 to number - 1."""
        if self.position >= len(self.schedule):
            raise ScheduleOver
        self.position += 1
        return self.schedule[self.position - 1] % number

    def play(self) -> None:
        """All of the schedule, every answer checked."""
        actions = self.actions()
        try:
            while True:
                actions[self.choose(len(actions))]()
                self.check()
        except ScheduleOver:
            self.check()

    # -- actions

    def actions(self) -> tuple:
        """What a byte of the schedule chooses from."""
        return (
            *(self.admit, self.admit, self.admit, self.arrive, self.arrive, self.arrive, self.train, self.finish_update),
            *(self.publish, self.begin_syncs, self.end_sync, self.release, self.die, self.come_up, self.hold),
            *(self.release_hold, self.observe, self.move, self.end_overdue, self.arrive_old),
        )

    def admit(self) -> bool:
        group, attempt = self.again[0] if self.again else (f"g{self.num_new:04}", 0)
        admission = self.coordinator.admit(group, now_s=self.now_s, prompt=f"prompt {self.num_new % 3}")
        if admission is None:
            return False
        assert (admission.group, admission.attempt, len(admission.instances)) == (group, attempt, 2)
        assert all(self.serves[index] is not None and index not in self.syncing for index in admission.instances)
        assert admission.version == min(self.serves[index] for index in admission.instances)
        assert admission.version + self.settings.staleness >= self.version
        assert len(self.in_flight) < self.settings.max_groups_in_flight
        if self.settings.sticky == "group":
            assert len(set(admission.instances)) == 1
        if self.again:
            self.again.popleft()
        else:
            self.num_new += 1
        self.in_flight[group] = (admission.version, attempt)
        return True

    def arrive(self) -> None:
        if self.in_flight:
            self.arrive_one(sorted(self.in_flight)[self.choose(len(self.in_flight))])

    def arrive_old(self) -> None:
        """A dead instance's work went on at an older one."""
        if self.in_flight and self.choose(4) == 0:
            group = sorted(self.in_flight)[self.choose(len(self.in_flight))]
            self.arrive_one(group, oldest=max(0, self.in_flight[group][0] - self.choose(3)))

    def arrive_one(self, group: str, oldest: int | None = None) -> None:
        admitted, attempt = self.in_flight.pop(group)
        buffer = self.coordinator.arrive(group, oldest=oldest)
        counts = admitted if oldest is None else min(admitted, oldest)
        if buffer is not None:
            assert self.version <= buffer < self.settings.num_steps
            assert buffer - counts <= self.settings.staleness
            assert not (self.is_training and buffer == self.ledger.version)
            self.arrived[group] = (buffer, counts)
        else:
            assert counts < admitted or self.settings.redundant_groups > 0, "a group with a promised slot found none"
            self.num_wasted += counts == admitted
            self.leave(group, attempt, may_come_again=True)

    def release(self) -> None:
        if self.in_flight and self.choose(3) == 0:
            group = sorted(self.in_flight)[self.choose(len(self.in_flight))]
            self.release_one(group, may_come_again=self.choose(2) == 0)

    def release_one(self, group: str, *, may_come_again: bool) -> None:
        _, attempt = self.in_flight.pop(group)
        self.coordinator.release(group)
        self.leave(group, attempt, may_come_again=may_come_again)

    def leave(self, group: str, attempt: int, *, may_come_again: bool) -> None:
        if may_come_again:
            may = self.coordinator.reissue(group)
            assert may == (attempt < self.settings.max_reissues)
            if may:
                self.again.append((group, attempt + 1))
                return
        self.dropped.add(group)

    def train(self) -> None:
        if self.is_training or not self.ledger.is_ready():
            return
        version = self.ledger.version
        consumed = self.coordinator.consume()
        expected = {group: counts for group, (buffer, counts) in self.arrived.items() if buffer == version}
        assert consumed.version == version == len(self.trained)
        assert dict(consumed.admitted) == expected and len(expected) == self.settings.groups_per_buffer
        assert consumed.max_version_gap == max(version - counts for counts in expected.values()) <= self.settings.staleness
        for group in consumed.groups:
            del self.arrived[group]
        self.trained.append(sorted(consumed.groups))
        self.is_training = True
        assert len(consumed.expired) <= self.settings.redundant_groups
        self.num_wasted += len(consumed.expired)
        for group in consumed.expired:
            self.leave(group, self.in_flight.pop(group)[1], may_come_again=True)

    def finish_update(self) -> None:
        if not self.is_training:
            return
        next_version = self.ledger.version + 1
        if not self.unpublished and self.choose(2) == 0:
            self.announce(next_version)  # pushed before the driver has counted the update
        else:
            self.unpublished.append(next_version)
        assert self.coordinator.advance() == next_version
        self.is_training = False

    def publish(self) -> None:
        if self.unpublished:
            self.announce(self.unpublished.popleft())

    def announce(self, version: int) -> None:
        self.published = version
        self.coordinator.published(version)

    def begin_syncs(self) -> None:
        orders = self.coordinator.due_syncs()
        for order in orders:
            assert self.serves[order.instance] is not None and order.instance not in self.syncing
            wanted = self.published if self.held is None else min(self.published, self.held)
            assert order.version == wanted > self.serves[order.instance]
            if self.held is not None and self.published >= self.held:
                assert self.serves[order.instance] < self.held
        assert orders == self.coordinator.due_syncs()
        for order in orders[: 1 + self.choose(2)] if len(orders) > 1 else orders:
            self.coordinator.sync_began(order.instance)
            self.syncing[order.instance] = order.version

    def end_sync(self) -> None:
        if self.syncing:
            index = sorted(self.syncing)[self.choose(len(self.syncing))]
            self.end_sync_of(index, is_good=self.choose(4) > 0)

    def end_sync_of(self, index: int, *, is_good: bool) -> None:
        version = self.syncing.pop(index)
        if is_good:
            self.serves[index] = version
            self.coordinator.synced(index, version)
        else:
            self.coordinator.sync_failed(index)

    def die(self) -> None:
        index = self.choose(self.settings.num_instances)
        if self.serves[index] is not None and self.choose(2) == 0:
            self.serves[index] = None
            self.coordinator.instance_is_down(index)
            if self.syncing.pop(index, None) is not None:
                self.coordinator.sync_failed(index)

    def come_up(self) -> None:
        down = [index for index, version in enumerate(self.serves) if version is None]
        if down:
            self.come_up_one(down[self.choose(len(down))], self.choose(self.published + 1))

    def come_up_one(self, index: int, version: int) -> None:
        self.serves[index] = version
        self.coordinator.instance_is_up(index, version)

    def hold(self) -> None:
        if self.held is None:
            self.held = self.unpublished[0] if self.unpublished and self.choose(2) == 0 else self.published
            self.coordinator.hold(self.held)

    def release_hold(self) -> None:
        if self.held is not None:
            self.held = None
            self.coordinator.release_hold()

    def observe(self) -> None:
        index, loads = self.choose(self.settings.num_instances), self.choose(256)
        load = InstanceLoad(num_running=loads % 4, num_waiting=loads // 4 % 3, tokens_per_s=float(loads), cache_usage=loads / 255)
        self.coordinator.observe(index, load)

    def move(self) -> None:
        for move in self.coordinator.due_moves():
            assert self.serves[move.target] is not None and move.target not in self.syncing and move.source != move.target
            assert self.serves[move.target] >= self.in_flight[move.group][0], "its tokens would be older than V_traj"
            self.coordinator.moved(move.group, move.target)

    def end_overdue(self) -> None:
        self.now_s += self.choose(8)
        for overdue in self.coordinator.overdue(self.now_s):
            if overdue.action is OverdueAction.TRUNCATE:
                self.arrive_one(overdue.group)
            else:
                self.release_one(overdue.group, may_come_again=overdue.action is OverdueAction.RETRY)

    # -- checks

    @property
    def version(self) -> int:
        """The earliest buffer that a group may still enter."""
        return self.ledger.version + self.is_training

    def check(self) -> None:
        """The books agree, and nothing is lost or counted twice."""
        assert set(self.ledger.in_flight) == set(self.in_flight)
        assert self.ledger.num_arrived == len(self.arrived)
        trained = [group for groups in self.trained for group in groups]
        places = [*trained, *self.in_flight, *self.arrived, *self.dropped, *(group for group, _ in self.again)]
        assert len(places) == len(set(places)) == self.num_new, "each group that was issued is in exactly one place"
        filled = self.num_full_buffers() + len(self.trained)
        assert self.num_wasted <= self.settings.redundant_groups * filled, "more groups were played in vain than are redundant"
        outstanding = self.coordinator.outstanding(self.now_s)
        assert [each.group for each in outstanding] == list(self.in_flight)
        assert all(self.serves[index] is not None for each in outstanding for index in each.instances)
        for instance in self.coordinator.instances:
            assert instance.num_episodes == sum(instance.groups.values()) >= 0
            assert set(instance.groups) <= set(self.in_flight)
            assert instance.is_up == (self.serves[instance.index] is not None)
            assert not instance.is_up or instance.version == self.serves[instance.index]

    def num_full_buffers(self) -> int:
        counts = [buffer for buffer, _ in self.arrived.values()]
        return sum(counts.count(buffer) == self.settings.groups_per_buffer for buffer in set(counts))

    # -- what must always be possible

    def most_rounds(self) -> int:
        """Of letting everything arrive, until an update can be made."""
        return (self.settings.staleness + 1) * self.settings.groups_per_buffer

    def carry_out_orders(self) -> int:
        """Every sync order, until there is none; how many."""
        num_done = 0
        for index in list(self.syncing):
            self.end_sync_of(index, is_good=True)
        while orders := self.coordinator.due_syncs():
            for order in orders:
                self.coordinator.sync_began(order.instance)
                self.syncing[order.instance] = order.version
                self.end_sync_of(order.instance, is_good=True)
            num_done += len(orders)
            assert num_done <= 2 * self.settings.num_instances, "sync orders without end"
        return num_done

    def reach_hold(self) -> None:
        """A validation always gets its weights, whatever the ledger looks like, if an instance is live."""
        if self.held is None:
            return
        while self.published < self.held:
            self.publish()
        self.carry_out_orders()
        assert self.coordinator.is_held_at(self.held) == any(version is not None for version in self.serves)

    def complete(self) -> None:
        """Let everything in flight arrive and carry out all orders: the run makes all its updates.

        From every state, whatever came before: validations end, updates end, syncs end, a dead instance comes back with version 0.
        """
        self.reach_hold()
        self.release_hold()
        if all(version is None for version in self.serves):
            self.come_up_one(0, 0)
        self.schedule, self.position = b"\x01" * 10_000, 0
        while len(self.trained) < self.settings.num_steps or self.is_training:
            self.next_update()
            self.check()
        assert not self.in_flight and not self.arrived, "more was admitted than is trained on"

    def next_update(self) -> None:
        self.finish_update()
        while self.unpublished:
            self.publish()
        rounds = 0
        while not self.ledger.is_ready() and self.ledger.version < self.settings.num_steps:
            self.carry_out_orders()
            for group in list(self.in_flight):
                self.arrive_one(group)
            if self.ledger.is_ready():
                break
            self.carry_out_orders()
            num_admitted = 0
            while self.admit():
                num_admitted += 1
            assert num_admitted > 0, f"nothing in flight, nothing to sync, no update ready, nothing admitted: {self}"
            rounds += 1
            assert rounds <= self.most_rounds(), "every round must fill a slot of the updates ahead"
        self.train()


@dataclass
class PlainWorld(World):
    """Nothing dies, and which groups carry no signal is a property of the groups: what a synchronous loop sees, in any order of events."""

    without_signal: frozenset = frozenset()

    def actions(self) -> tuple:
        """See above."""
        return (
            self.admit,
            self.admit,
            self.arrive,
            self.arrive,
            self.train,
            self.finish_update,
            self.publish,
            self.begin_syncs,
            self.end_sync,
        )

    def arrive_one(self, group: str, oldest: int | None = None) -> None:
        """See above."""
        if group in self.without_signal:
            self.release_one(group, may_come_again=False)
        else:
            super().arrive_one(group, oldest)

    def most_rounds(self) -> int:
        """See above."""
        return super().most_rounds() + len(self.without_signal)
