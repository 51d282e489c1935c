"""Who plays what, who syncs when: every decision of asynchronous training, and nothing else.

The coordinator is told facts (an instance came up, a group arrived, an update was made) and asked for decisions. It has no clock
and does no I/O, so that a run and the simulator decide alike. Orders are computed from the state: asking twice gives them twice,
until the fact that they were acted on is told. The exception is `overdue`, which names each group once.

Invariants: a group is given only to instances whose weights the ledger has a slot for; an instance that is down or syncing is
given nothing; every instance that cannot be given anything and is behind is ordered to sync, unless a hold forbids it. No policy
and no share keeps a group waiting while nothing is in flight.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

from psrl.config.asynchrony import ProactiveFilterConfig, RoutingConfig, SyncConfig
from psrl.config.psrl_section import PsrlConfig
from psrl.staleness.admission import Admission, within_share
from psrl.staleness.filters import OverdueAction, ProactiveFilter
from psrl.staleness.instances import Instance, InstanceLoad
from psrl.staleness.ledger import Consumed, StalenessLedger
from psrl.staleness.migration import Move, next_moves
from psrl.staleness.routing import routers
from psrl.staleness.sync_policy import sync_policies
from psrl.types import GroupUid, PolicyVersion

INDEX = attrgetter("index")
MAX_ENDED_GROUPS = 4096
"""Groups that were issued again, left once more and were neither issued again nor given up: the oldest are forgotten first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorSettings:
    """What the coordinator needs of the settings."""

    episodes_per_group: int
    """rollout_n and the redundant ones."""
    max_groups_in_flight: int
    max_reissues: int
    sync: SyncConfig
    routing: RoutingConfig
    proactive_filter: ProactiveFilterConfig
    seed: int
    """Of routing by chance."""

    @classmethod
    def of(cls, psrl: PsrlConfig, *, max_groups_in_flight: int, seed: int) -> CoordinatorSettings:
        """From the section `psrl`; `max_groups_in_flight` is given, since 0 there depends on the agent workers."""
        assert max_groups_in_flight >= 1, f"max_groups_in_flight={max_groups_in_flight}"
        return cls(
            episodes_per_group=psrl.rollout_n + psrl.redundant_episodes,
            max_groups_in_flight=max_groups_in_flight,
            max_reissues=psrl.max_reissues,
            sync=psrl.sync,
            routing=psrl.routing,
            proactive_filter=psrl.proactive_filter,
            seed=seed,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncOrder:
    """An instance shall take newer weights."""

    instance: int
    version: PolicyVersion
    """The latest published, or the one that is held."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Overdue:
    """A group is in flight too long."""

    group: GroupUid
    action: OverdueAction


@dataclass(frozen=True, kw_only=True, slots=True)
class Outstanding:
    """A group in flight, for whoever asks what the run waits for."""

    group: GroupUid
    instances: tuple[int, ...]
    """Those that play it; none after they all died."""
    version: PolicyVersion
    """V_traj."""
    age_s: float
    attempt: int


class Coordinator:
    """The state behind the decisions; one owner, calls serialised.

    Example:
        staleness=0, one instance at version 0, buffers of 1 group: `admit("a")` is given to instance 0 at version 0, `admit("b")`
        to none. After `arrive("a")`, `consume()`, `advance()` and `published(1)` nothing can be admitted at version 0, so
        `due_syncs()` orders instance 0 to take version 1; after `synced(0, 1)` "b" is admitted at version 1.
    """

    def __init__(self, settings: CoordinatorSettings, ledger: StalenessLedger, *, num_instances: int) -> None:
        assert num_instances >= 1, f"num_instances={num_instances}"
        self.ledger = ledger
        self._settings = settings
        self._instances = [Instance(index=index, version=ledger.version) for index in range(num_instances)]
        self._latest = ledger.version
        self._by_currency: tuple[list[Instance], list[Instance]] | None = None
        """Live instances that take no weights: those that serve the latest, and the others. None after a change."""
        self._num_syncing = 0
        self._hold: PolicyVersion | None = None
        self._router = routers.resolve(settings.routing.policy)()
        self._wants_sync = sync_policies.resolve(settings.sync.policy)
        self._filter = ProactiveFilter(settings.proactive_filter)
        self._rng = random.Random(settings.seed)
        self._admitted_at_s: dict[GroupUid, float] = {}
        """Of the groups in flight, in order of admission."""
        self._placed: dict[GroupUid, tuple[int, ...]] = {}
        """Their instances, one per episode as admitted or moved; dead ones included."""
        self._attempts: dict[GroupUid, int] = {}
        """Of groups that were issued again, until they are trained on or given up."""
        self._ended: dict[GroupUid, None] = {}
        """Of those in `_attempts`, the groups that left without being trained on and were not issued again, in order."""

    # -- facts ------------------------------------------------------------------------------------------------------------------

    @property
    def latest(self) -> PolicyVersion:
        """The newest weights that an instance can take."""
        return self._latest

    @property
    def instances(self) -> tuple[Instance, ...]:
        """For reading."""
        return tuple(self._instances)

    def instance_is_up(self, index: int, version: PolicyVersion) -> None:
        """It serves `version`, which may be an old one; also after a restart of which nobody said that it was down."""
        instance = self._changed(index)
        if instance.is_up:
            instance.go_down()
        instance.come_up(version)
        self._router.forget(index)

    def instance_is_down(self, index: int) -> None:
        """It died. Groups that were given to it stay in flight: they are played on elsewhere, arrive, or are released."""
        self._changed(index).go_down()

    def observe(self, index: int, load: InstanceLoad) -> None:
        """A report of an instance; one that comes after its death is passed over."""
        if self._instances[index].is_up:
            self._instances[index].observe(load)

    def published(self, version: PolicyVersion) -> None:
        """Instances can take `version` now."""
        assert version >= self._latest, f"version {version} is published after {self._latest}"
        self._latest = version
        self._by_currency = None

    def sync_began(self, index: int) -> None:
        """Until it ends the instance is given nothing."""
        self._changed(index).is_syncing = True

    def synced(self, index: int, version: PolicyVersion) -> None:
        """It serves `version`; passed over if it died meanwhile, since `instance_is_up` says what it serves then."""
        instance = self._changed(index)
        if instance.is_up and instance.is_syncing:
            instance.take(version)
            self._router.forget(index)

    def sync_failed(self, index: int) -> None:
        """It serves what it served before; `due_syncs` orders it again."""
        self._changed(index).is_syncing = False

    # -- hold -------------------------------------------------------------------------------------------------------------------

    def hold(self, version: PolicyVersion) -> None:
        """Instances are brought to `version` and not beyond it, until `release_hold`; groups are admitted all the while.

        `version` is the latest published, or will be the next.
        """
        assert self._hold is None, f"version {self._hold} is held already"
        assert version >= self._latest, f"version {version} cannot be held: {self._latest} is published"
        self._hold = version

    def release_hold(self) -> None:
        """Instances may go on to newer weights."""
        self._hold = None

    def is_held_at(self, version: PolicyVersion) -> bool:
        """Whether an instance is live and every live one serves `version`.

        One that was started again meanwhile with newer weights cannot be brought back, and does not count: with nothing but such
        ones the answer is True as well, since waiting could not change it. `serving` says whom to ask.
        """
        live = [each for each in self._instances if each.is_up]
        return bool(live) and all(each.version >= version and not each.is_syncing for each in live)

    def serving(self, version: PolicyVersion) -> tuple[int, ...]:
        """Live instances that serve exactly `version`."""
        return tuple(each.index for each in self._instances if each.is_up and not each.is_syncing and each.version == version)

    # -- groups -----------------------------------------------------------------------------------------------------------------

    def admit(self, group: GroupUid, *, now_s: float, prompt: str = "") -> Admission | None:
        """Give a group to instances with room in the ledger; None while there is none, or as many groups as may be are in flight."""
        if len(self._placed) >= self._settings.max_groups_in_flight:
            return None
        views = self._open_instances()
        if not views:
            return None
        placed = self._place(group, views, prompt)
        serving = min(self._instances[index].version for index in placed)
        version = self.ledger.reserve(group, serving=serving)
        assert version is not None, f"the ledger had a slot for version {serving}"
        self._placed[group] = placed
        self._admitted_at_s[group] = now_s
        return Admission(group=group, version=version, instances=placed, attempt=self.attempt_of(group))

    def is_in_flight(self, group: GroupUid) -> bool:
        """Whether it was admitted and has neither arrived, nor been released, nor expired."""
        return group in self._placed

    def arrive(self, group: GroupUid, *, oldest: PolicyVersion | None = None) -> PolicyVersion | None:
        """It is complete: the buffer that takes it, or None (surplus: it may be issued again). `oldest` is of its sampled tokens."""
        buffer = self.ledger.occupy(group, oldest=oldest)
        self._left(group)
        if buffer is not None:
            self._give_up(group)
        return buffer

    def release(self, group: GroupUid) -> None:
        """It will not arrive, or has nothing to train on."""
        self.ledger.release(group)
        self._left(group)

    def consume(self) -> Consumed:
        """Take the ready buffer. Its expired groups are in flight no more: whoever plays them shall end them."""
        consumed = self.ledger.consume()
        for group in consumed.expired:
            self._left(group)
        return consumed

    def advance(self) -> PolicyVersion:
        """The update is made; instances take it by `due_syncs` once it is published."""
        self._filter.begin_step()
        return self.ledger.advance()

    def attempt_of(self, group: GroupUid) -> int:
        """How often it was issued before."""
        return self._attempts.get(group, 0)

    def reissue(self, group: GroupUid) -> bool:
        """Whether a group that left without being trained on may be issued again; if so, its next admission is another attempt."""
        assert group not in self._placed, f"group {group} is in flight"
        attempt = self.attempt_of(group) + 1
        if attempt > self._settings.max_reissues:
            self._give_up(group)
            return False
        self.remember_attempts({group: attempt})
        return True

    def remember_attempts(self, attempts: Mapping[GroupUid, int]) -> None:
        """Of groups that wait to be issued again, such as those of a checkpoint."""
        for group, attempt in attempts.items():
            if attempt > 0:
                self._attempts[group] = attempt
            self._ended.pop(group, None)

    # -- orders -----------------------------------------------------------------------------------------------------------------

    def due_syncs(self) -> list[SyncOrder]:
        """Instances that shall take the latest weights now, or those that are held; until they have, they are given nothing."""
        version = self._latest if self._hold is None else min(self._latest, self._hold)
        return [SyncOrder(instance=each.index, version=version) for each in self._split()[1] if self._is_due(each)]

    def due_moves(self) -> list[Move]:
        """Groups that shall go on at another instance; none while psrl.routing.migrate is off."""
        if not self._settings.routing.migrate:
            return []
        return next_moves(self._instances, admitted_version=self.ledger.admitted_version)

    def moved(self, group: GroupUid, target: int) -> None:
        """All its episodes are at `target` now; passed over if it has ended meanwhile."""
        if group not in self._placed:
            return
        num_episodes = len(self._placed[group])
        for index in set(self._placed[group]):
            self._instances[index].remove(group)
        self._placed[group] = (target,) * num_episodes
        if self._instances[target].is_up:
            self._instances[target].add(group, num_episodes)

    def overdue(self, now_s: float) -> list[Overdue]:
        """Groups that are in flight too long, each named once."""
        action = self._filter.action
        return [] if action is None else [Overdue(group=each, action=action) for each in self._filter.overdue(self._admitted_at_s, now_s)]

    def outstanding(self, now_s: float) -> list[Outstanding]:
        """Every group in flight, longest first."""
        return [
            Outstanding(
                group=group,
                instances=tuple(index for index in self._placed[group] if group in self._instances[index].groups),
                version=self.ledger.admitted_version(group),
                age_s=now_s - admitted_at_s,
                attempt=self.attempt_of(group),
            )
            for group, admitted_at_s in self._admitted_at_s.items()
        ]

    # -- inside -----------------------------------------------------------------------------------------------------------------

    def _place(self, group: GroupUid, views: list[Instance], prompt: str) -> tuple[int, ...]:
        num_episodes = self._settings.episodes_per_group
        if self._settings.routing.sticky == "group":
            index = self._router.choose(views, key=group, prompt=prompt, rng=self._rng)
            self._instances[index].add(group, num_episodes)
            return (index,) * num_episodes
        placed = []
        for _ in range(num_episodes):
            placed.append(self._router.choose(views, key=group, prompt=prompt, rng=self._rng))
            self._instances[placed[-1]].add(group, 1)
        return tuple(placed)

    def _left(self, group: GroupUid) -> None:
        for index in set(self._placed.pop(group)):
            self._instances[index].remove(group)
        del self._admitted_at_s[group]
        self._filter.forget(group)
        if group in self._attempts:
            self._ended[group] = None
            if len(self._ended) > MAX_ENDED_GROUPS:
                self._give_up(next(iter(self._ended)))

    def _give_up(self, group: GroupUid) -> None:
        self._attempts.pop(group, None)
        self._ended.pop(group, None)

    def _changed(self, index: int) -> Instance:
        self._by_currency = None
        return self._instances[index]

    def _split(self) -> tuple[list[Instance], list[Instance]]:
        if self._by_currency is None:
            able = [each for each in self._instances if each.is_up and not each.is_syncing]
            self._num_syncing = sum(each.is_up and each.is_syncing for each in self._instances)
            current = [each for each in able if each.version == self._latest]
            self._by_currency = current, [each for each in able if each.version != self._latest]
        return self._by_currency

    def _open_instances(self) -> list[Instance]:
        """Those that may be given a group: able to play, not about to take weights, at a version that the ledger has a slot for."""
        current, others = self._split()
        room = self.ledger.room(self._latest)
        views, num_awaited = current if room > 0 else [], self._num_syncing
        for each in others:
            if self._is_due(each):
                num_awaited += 1
            elif self.ledger.can_reserve(each.version):
                views, room = [*views, each], max(room, self.ledger.room(each.version))
        if num_awaited > 0:
            room = min(room, self._settings.max_groups_in_flight - len(self._placed))
            num_groups, episodes = room + len(self._placed), self._settings.episodes_per_group
            views = within_share(views, num_awaited=num_awaited, num_groups=num_groups, episodes_per_group=episodes)
        return sorted(views, key=INDEX) if others else views

    def _is_due(self, instance: Instance) -> bool:
        """Whether a live instance that takes no weights shall take the latest now."""
        if instance.version >= self._latest:
            return False
        if self._hold is not None and self._latest >= self._hold:
            return instance.version < self._hold
        return instance.is_new or self._is_starving(instance) or self._wants_sync(instance, self._latest, self._settings.sync)

    def _is_starving(self, instance: Instance) -> bool:
        """Nothing can be admitted at its version, and newer weights would change that, or would at least interrupt nothing."""
        if self.ledger.can_reserve(instance.version):
            return False
        return self.ledger.can_reserve(self._latest) or instance.num_episodes == 0
