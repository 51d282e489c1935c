"""Which instance plays an episode, among those that may."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from operator import attrgetter
from typing import Protocol

from psrl.registry import Registry
from psrl.staleness.instances import Instance

CACHE_BLOCK_CHARACTERS = 128
"""Prompts are compared in blocks of so many characters: a system prompt is dozens of them, and engines cache by blocks too."""
CACHE_BLOCKS_PER_INSTANCE = 16384
"""Blocks remembered of each instance, the least recently used forgotten first (2 MB of text)."""
MAX_EXTRA_EPISODES_SHARE = 0.5
"""An instance that knows the prompt may have this share more episodes than the least loaded one, and one group more."""

NUM_EPISODES = attrgetter("num_episodes")


class Router(Protocol):
    """Chooses an instance. May keep state of its own; the coordinator owns one."""

    def choose(self, views: Sequence[Instance], *, key: str, prompt: str, rng: random.Random) -> int:
        """Index of one of `views`, which are not empty.

        Args:
            views: Instances that may be given the episode, by index.
            key: The group's uid.
            prompt: Text that the episode begins with, as far as it is known; may be empty.
            rng: For choices by chance.
        """
        ...

    def forget(self, index: int) -> None:
        """The instance has no cache any more: it took newer weights or was started again."""
        ...


routers = Registry[type[Router]]("router", key="psrl.routing.policy")


class _Forgetful:
    """A router without memory of prompts."""

    def forget(self, index: int) -> None:
        """Nothing is remembered."""


@routers.register("random")
class RandomRouter(_Forgetful):
    """Any, with equal chances."""

    def choose(self, views: Sequence[Instance], *, key: str, prompt: str, rng: random.Random) -> int:
        """As the protocol says."""
        return views[rng.randrange(len(views))].index


@routers.register("round_robin")
class RoundRobinRouter(_Forgetful):
    """One after the other; those that may not be given work are passed over."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, views: Sequence[Instance], *, key: str, prompt: str, rng: random.Random) -> int:
        """As the protocol says."""
        chosen = next((view.index for view in views if view.index >= self._next), views[0].index)
        self._next = chosen + 1
        return chosen


@routers.register("request_num_balance")
class BalanceRouter(_Forgetful):
    """The one with the fewest episodes in flight; of equal ones the first."""

    def choose(self, views: Sequence[Instance], *, key: str, prompt: str, rng: random.Random) -> int:
        """As the protocol says."""
        return least_loaded(views).index


@routers.register("cache_aware")
class CacheAwareRouter:
    """The one that has seen most of the prompt, as long as it is not much fuller than the least loaded one.

    What an instance has seen is what it was given since its weights changed: a cache never serves keys of older weights.
    """

    def __init__(self) -> None:
        self._seen: dict[int, OrderedDict[int, None]] = {}
        """Instance -> hashes of prompts' beginnings, one per block, most recently used last."""

    def choose(self, views: Sequence[Instance], *, key: str, prompt: str, rng: random.Random) -> int:
        """As the protocol says. Episodes of one group share their prompt even where it is not known: its uid stands for it."""
        blocks = prefix_hashes(prompt or key)
        least = least_loaded(views)
        most = least.num_episodes * (1 + MAX_EXTRA_EPISODES_SHARE) + 1
        candidates = [view for view in views if view.num_episodes <= most]
        num_known, chosen = 0, least
        for view in candidates:
            num = self._num_known(view.index, blocks)
            if num > num_known or (num == num_known and view.num_episodes < chosen.num_episodes):
                num_known, chosen = num, view
        self._remember(chosen.index, blocks)
        return chosen.index

    def forget(self, index: int) -> None:
        """As the protocol says."""
        self._seen.pop(index, None)

    def _num_known(self, index: int, blocks: Sequence[int]) -> int:
        seen = self._seen.get(index)
        if not seen:
            return 0
        return next((number for number, block in enumerate(blocks) if block not in seen), len(blocks))

    def _remember(self, index: int, blocks: Sequence[int]) -> None:
        seen = self._seen.setdefault(index, OrderedDict())
        for block in blocks:
            seen[block] = None
            seen.move_to_end(block)
        while len(seen) > CACHE_BLOCKS_PER_INSTANCE:
            seen.popitem(last=False)


def least_loaded(views: Sequence[Instance]) -> Instance:
    """The one with the fewest episodes in flight; of equal ones the first."""
    return min(views, key=NUM_EPISODES)


def prefix_hashes(text: str) -> list[int]:
    """One hash for each beginning of `text` that is a whole number of blocks, and one for all of it."""
    hashes, value = [], 0
    for start in range(0, len(text), CACHE_BLOCK_CHARACTERS):
        value = hash((value, text[start : start + CACHE_BLOCK_CHARACTERS]))
        hashes.append(value)
    return hashes
