"""The rollout loop: every training task is played `psrl.rollout_n` times and nothing is trained; all episodes are stored whole.

Invariant: an episode that has ended for a reason of the policy's stands once in `trajectories/train.jsonl`, however often the rollout
was stopped and resumed. Uids and seeds are those of a training run's first epoch, so a resume plays what the unbroken rollout would have.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from psrl.config.tree import Config
from psrl.runtime.failures import FailureLimit
from psrl.runtime.group_play import Member
from psrl.runtime.groups import EpisodeSummary, summary_of
from psrl.runtime.measures import episode_metrics
from psrl.runtime.tickets import training_tickets
from psrl.telemetry import names
from psrl.telemetry.errors_log import ErrorLog
from psrl.types import Episode, EpisodeTicket, EpisodeUid, PolicyVersion, Task

LOGS_OF_A_ROLLOUT = 20
"""About so many times its metrics are logged."""
Play = Callable[[Task, EpisodeTicket], Awaitable["Played"]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """An episode that has ended."""

    summary: EpisodeSummary
    episode: Episode | None
    """None where those who played it died with it."""

    @classmethod
    def of(cls, member: Member) -> Played:
        """From whoever played it in this process."""
        return cls(summary=summary_of(member), episode=member.episode)


@dataclass(frozen=True, kw_only=True)
class RolloutSummary:
    """What a rollout left."""

    run_folder: Path
    num_tasks: int
    num_episodes: int
    """Stored, those of earlier starts included."""
    num_left: int
    """Not played, or ended for no reason of the policy's: a resume plays them."""
    accuracy: float | None
    reward: float | None
    tool_rate: float | None
    outcomes: str
    sampled_tokens: int | None
    """None where somebody else sampled them."""
    seconds: float
    """Of playing, since this start."""
    stopped_early: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Sinks:
    """Where a rollout's results go."""

    write: Callable[[Episode], None]
    log: Callable[[dict[str, float], int], None]
    """Metrics of all episodes so far, and how many these are."""
    errors: ErrorLog
    tell: Callable[[str, bool], None]
    """How far it is, and whether an episode has just ended."""


class Rollout:
    """One pass over the tasks.

    Consumes: the episodes that are not stored yet, task by task.
    Waits for: those that are played, `num_at_once` of them.
    Unblocked by: each episode's deadlines.
    """

    def __init__(self, config: Config, tasks: Sequence[Task], stored: Sequence[EpisodeSummary], sinks: Sinks, *, num_at_once: int) -> None:
        """`stored` are the episodes of earlier starts."""
        self._tasks = tasks
        self._rollout_n, self._run_seed = config.psrl.rollout_n, config.trainer.seed
        self._sinks = sinks
        self._num_at_once = num_at_once
        self._failures = FailureLimit(sinks.errors, max_rate=config.psrl.max_infra_error_rate)
        self._summaries = {summary.uid: summary for summary in stored}
        """Of what is stored, and of failures since this start."""
        self._is_stored: set[EpisodeUid] = {summary.uid for summary in stored}
        self._num_solved = sum(map(_is_solved, stored))
        self._num_before = len(stored)
        self.num_total = len(tasks) * self._rollout_n
        self._num_logged = 0
        self._began: float | None = None

    async def run(self, play: Play) -> None:
        """Play what is open; what has ended is stored at once, so that a cancellation loses only what is in flight.

        Raises:
            PsrlError: Too many episodes fail, or those who play them.
        """
        self._began = time.monotonic()
        open_episodes = self._open_episodes()
        try:
            async with asyncio.TaskGroup() as players:
                for _ in range(max(1, min(self._num_at_once, self.num_left))):
                    players.create_task(self._play_on(open_episodes, play))
        finally:
            self._log()

    @property
    def num_left(self) -> int:
        """Not stored. A resume with a smaller `psrl.rollout_n` may have more stored than it asks for."""
        return sum(1 for _ in self._open_episodes())

    def so_far(self) -> str:
        """`12/64 episodes, 7 solved`"""
        return f"{len(self._is_stored)}/{self.num_total} episodes, {self._num_solved} solved"

    def summary(self, run_folder: Path, *, stopped_early: bool, is_captured: bool) -> RolloutSummary:
        """What there is now."""
        summaries = list(self._summaries.values())
        metrics = episode_metrics(summaries) if summaries else {}
        counted = Counter(summary.outcome.value for summary in summaries)
        return RolloutSummary(
            run_folder=run_folder,
            num_tasks=len(self._tasks),
            num_episodes=len(self._is_stored),
            num_left=self.num_left,
            accuracy=metrics.get(names.ACCURACY_MEAN),
            reward=metrics.get(names.REWARD_MEAN),
            tool_rate=metrics.get(names.TOOL_RATE) if is_captured else None,
            outcomes=", ".join(f"{name} {count}" for name, count in counted.most_common()) or "none",
            sampled_tokens=sum(summary.num_sampled for summary in summaries) if is_captured else None,
            seconds=0.0 if self._began is None else time.monotonic() - self._began,
            stopped_early=stopped_early,
        )

    def _open_episodes(self) -> Iterator[tuple[Task, EpisodeTicket]]:
        for task in self._tasks:
            for ticket in training_tickets(task, rollout_n=self._rollout_n, version=PolicyVersion(0), run_seed=self._run_seed):
                if ticket.uid not in self._is_stored:
                    yield task, ticket

    async def _play_on(self, open_episodes: Iterator[tuple[Task, EpisodeTicket]], play: Play) -> None:
        """One episode after the other."""
        for task, ticket in open_episodes:
            played = await play(task, ticket)
            self._summaries[played.summary.uid] = played.summary
            self._num_solved += _is_solved(played.summary)
            if played.episode is not None:
                self._sinks.write(played.episode)
                if played.summary.outcome.judges_policy:
                    self._is_stored.add(played.summary.uid)
            self._failures.count([played.summary], step=len(self._summaries))
            self._sinks.tell(self.so_far(), True)
            if len(self._summaries) - self._num_logged >= max(1, self.num_total // LOGS_OF_A_ROLLOUT):
                self._log()

    def _log(self) -> None:
        """Metrics of all episodes, also of earlier starts; tokens per second are of this one."""
        num_played = len(self._summaries)
        if num_played in (0, self._num_logged) or self._began is None:
            return
        self._num_logged = num_played
        metrics = episode_metrics(list(self._summaries.values()))
        seconds = max(time.monotonic() - self._began, 1e-9)
        new = list(self._summaries.values())[self._num_before :]
        metrics[names.GENERATION_TOKENS_PER_SECOND] = sum(summary.num_sampled for summary in new) / seconds
        self._sinks.log(metrics, num_played)


def _is_solved(summary: EpisodeSummary) -> bool:
    return (summary.accuracy or 0.0) >= 0.5
