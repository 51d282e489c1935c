"""What takes time in a run: episodes, the trainer, weights, failures. All of it drawn from one seed.

An episode's turns, tools and grading are drawn when its group is first played, from the group's uid, its attempt and the run's seed. So
two simulations with other settings play the same episodes, and their difference is the settings'.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Protocol

from psrl.simulation.instance import Pace
from psrl.types import GroupUid
from psrl.types.latency import Latency

NOTHING = Latency.constant(0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodePlan:
    """What an episode will ask of engines, tools and graders if nothing ends it before."""

    work: tuple[float, ...]
    """Of each turn; seconds, or tokens, as the pace counts."""
    num_tokens: tuple[float, ...]
    """Sampled by each turn."""
    tools_s: tuple[float, ...]
    """After each turn but the last."""
    reward_s: float

    def __post_init__(self) -> None:
        assert len(self.work) == len(self.num_tokens) == len(self.tools_s) + 1, f"lengths of {self}"


class Episodes(Protocol):
    """Where episodes come from."""

    def draw(self, rng: random.Random, num_members: int) -> list[EpisodePlan]:
        """The members of one group."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnEpisodes:
    """Every turn, tool call and grading independent of all others."""

    turn: Latency
    """Work of one turn."""
    tool: Latency = NOTHING
    reward: Latency = NOTHING
    min_turns: int = 1
    max_turns: int = 1
    """Turns of an episode are uniform between the two."""
    tokens: Latency = NOTHING
    """Tokens of one turn where its work is seconds; unused where its work is tokens."""
    is_work_in_tokens: bool = False

    def draw(self, rng: random.Random, num_members: int) -> list[EpisodePlan]:
        """See `Episodes`."""
        return [self._draw_one(rng) for _ in range(num_members)]

    def _draw_one(self, rng: random.Random) -> EpisodePlan:
        num_turns = rng.randint(self.min_turns, self.max_turns)
        work = tuple(self.turn.draw(rng) for _ in range(num_turns))
        return EpisodePlan(
            work=work,
            num_tokens=work if self.is_work_in_tokens else tuple(self.tokens.draw(rng) for _ in range(num_turns)),
            tools_s=tuple(self.tool.draw(rng) for _ in range(num_turns - 1)),
            reward_s=self.reward.draw(rng),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """What goes wrong, how often, and how long it takes to be there again."""

    replica_per_s: float = 0.0
    """Deaths of one instance per second of its life; what its turns had sampled is lost, and they are played elsewhere."""
    worker_per_s: float = 0.0
    """Deaths of one agent worker per second of its life; its groups are played again, whole, by another."""
    episode_share: float = 0.0
    """Share of episodes that end `infra_error` after they were played."""
    restart_s: float = 20.0
    """Until a replica or a worker that died works again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Everything that takes time."""

    episodes: Episodes
    pace: Pace = field(default_factory=Pace)
    train: Latency = NOTHING
    """Seconds of one update, from the ready buffer to the updated weights."""
    push: Latency = NOTHING
    """From there until the parameter server holds them; the trainer does nothing else meanwhile."""
    rest: Latency = NOTHING
    """From there until the trainer looks for the next buffer: metrics, checkpoints."""
    sync: Latency = NOTHING
    """Until an instance that begins to take them serves them; it plays on meanwhile, but for `pause`."""
    pause: Latency = NOTHING
    """The end of `sync`, in which the instance stands still."""
    recompute_s: float = 0.0
    """By which a replica stands still longer for each turn that the sync interrupts: its keys are computed again."""
    equal_share: float = 0.0
    """Share of groups whose rewards are all equal: `algorithm.filter_groups.enable` drops them."""
    failures: Failures = field(default_factory=Failures)
    tokens_per_work: float = 0.0
    """Mean tokens of one unit of work: how tokens per second are told from the rate."""


def rng_of(seed: int, what: GroupUid | str, attempt: int = 0) -> random.Random:
    """The random numbers of one thing, whatever else happens."""
    return random.Random(f"{seed}/{what}/{attempt}")
