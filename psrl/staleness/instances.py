"""Engine instances as the coordinator sees them: what they serve, what they play, what they report."""

from __future__ import annotations

from dataclasses import dataclass, field

from psrl.types import GroupUid, PolicyVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceLoad:
    """What an instance reports now and then."""

    num_running: int = 0
    """Turns that it samples."""
    num_waiting: int = 0
    """Turns that wait for a slot."""
    tokens_per_s: float = 0.0
    cache_usage: float = 0.0
    """Share of its cache, 0 to 1."""


@dataclass(kw_only=True, slots=True)
class Instance:
    """One replica, or several that act as one behind a gateway."""

    index: int
    version: PolicyVersion
    """Weights that it serves; while it is down, those that it served last."""
    is_up: bool = False
    is_syncing: bool = False
    is_new: bool = False
    """It came up and has neither been given anything nor taken weights."""
    num_episodes: int = 0
    """Episodes in flight that were given to it."""
    groups: dict[GroupUid, int] = field(default_factory=dict)
    """How many of each group, in order of admission."""
    load: InstanceLoad | None = None
    """The last report since it came up."""
    best_tokens_per_s: float = 0.0
    """The most that it reported since it came up."""

    def come_up(self, version: PolicyVersion) -> None:
        """Its process serves `version`; it plays nothing yet."""
        self.is_up, self.is_syncing, self.is_new, self.version = True, False, True, version
        self.load, self.best_tokens_per_s = None, 0.0

    def go_down(self) -> None:
        """Its process is gone, with the episodes that were given to it: others play them on, or they fail."""
        self.is_up, self.is_syncing = False, False
        self.groups.clear()
        self.num_episodes = 0

    def observe(self, load: InstanceLoad) -> None:
        """A report."""
        self.load = load
        self.best_tokens_per_s = max(self.best_tokens_per_s, load.tokens_per_s)

    def take(self, version: PolicyVersion) -> None:
        """It took weights."""
        self.is_syncing, self.is_new, self.version = False, False, version

    def add(self, group: GroupUid, num_episodes: int) -> None:
        """Episodes of a group are given to it."""
        self.groups[group] = self.groups.get(group, 0) + num_episodes
        self.num_episodes += num_episodes
        self.is_new = False

    def remove(self, group: GroupUid) -> int:
        """They are over or elsewhere; how many they were."""
        num_episodes = self.groups.pop(group, 0)
        self.num_episodes -= num_episodes
        return num_episodes
