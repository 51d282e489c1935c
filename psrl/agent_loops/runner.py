"""From a task and a ticket to an episode with its score; many at once.

Invariant: every call of `EpisodeRunner.run` ends in exactly one of an Episode or a cancellation, and `num_by_outcome` adds up to
the number of calls.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace

from psrl.agent_loops.base import AgentLoop, Failure, LoopParts, build_agent_loop, failure_or
from psrl.agent_loops.deadline import within
from psrl.config.reward import SCORE_TIMEOUT_S
from psrl.protocols import Scorer
from psrl.types import Episode, EpisodeTicket, EpisodeUid, LoopResult, Outcome, Score, Task

NO_SCORE = Score(reward=None)


class EpisodeRunner:
    """Runs an episode with the loop that its task asks for, and has it judged."""

    def __init__(self, parts: LoopParts, scorer: Scorer, *, score_timeout_s: float = SCORE_TIMEOUT_S) -> None:
        """Makes the default loop, so that a misspelt name fails at the start.

        Raises:
            ConfigError: `rollout.agent` names a loop, environment or agent data that there is not.
        """
        self._parts = parts
        self._scorer = scorer
        self._score_timeout_s = score_timeout_s
        self._default_loop = parts.rollout.agent.default_agent_loop
        self._loops: dict[str, AgentLoop] = {self._default_loop: build_agent_loop(self._default_loop, parts)}
        self.num_by_outcome: Counter[Outcome] = Counter()

    async def run(self, task: Task, ticket: EpisodeTicket) -> Episode:
        """Play and judge. Every failure is an outcome; a cancellation closes the environment, is counted `aborted` and goes on."""
        began = time.monotonic()
        try:
            result = await self._play(task, ticket)
            score, result = await judged(self._scorer, task, result, timeout_s=self._score_timeout_s)
        except asyncio.CancelledError:
            self.num_by_outcome[Outcome.ABORTED] += 1
            raise
        finally:
            self._parts.truncations.forget(ticket.uid)
        self.num_by_outcome[result.outcome] += 1
        total_s = time.monotonic() - began
        timings = replace(result.timings, total_s=total_s, reward_s=total_s - result.timings.total_s)
        return Episode(ticket=ticket, task=task, result=result, score=score, timings=timings)

    def truncate(self, uid: EpisodeUid) -> None:
        """Have an episode that runs end now; it is judged by what it has."""
        self._parts.truncations.of(uid).set()

    async def _play(self, task: Task, ticket: EpisodeTicket) -> LoopResult:
        async def play() -> LoopResult:
            return await self._loop_of(task).run(task, ticket)

        result = await failure_or(play())
        return _failed(task, result) if isinstance(result, Failure) else result

    def _loop_of(self, task: Task) -> AgentLoop:
        name = task.agent_name or self._default_loop
        if name not in self._loops:
            self._loops[name] = build_agent_loop(name, self._parts)
        return self._loops[name]


async def judged(scorer: Scorer, task: Task, result: LoopResult, *, timeout_s: float) -> tuple[Score, LoopResult]:
    """The score of an episode, and the result with what failed in judging it: then there is no reward."""
    if not result.outcome.judges_policy:
        return NO_SCORE, result
    score = await failure_or(within(scorer.score(task, result), timeout_s=timeout_s, what=f"scoring {task.uid}"))
    if not isinstance(score, Failure):
        return score, result
    counts = {**result.counts, f"errors/{score.name}": 1.0}
    return NO_SCORE, replace(result, counts=counts, error="; ".join(filter(None, (result.error, score.error))))


class EpisodePool:
    """At most `max_concurrent` episodes of a worker at once; further ones wait their turn."""

    def __init__(self, runner: EpisodeRunner, *, max_concurrent: int) -> None:
        """`max_concurrent` is `rollout.agent.max_concurrent_episodes`."""
        self._runner = runner
        self._free = asyncio.Semaphore(max_concurrent)
        self._tasks: dict[EpisodeUid, asyncio.Task[Episode]] = {}
        self._began: dict[EpisodeUid, float] = {}

    async def run(self, task: Task, ticket: EpisodeTicket) -> Episode:
        """One episode, as soon as there is room.

        Waits for: a free place. Unblocked by: another episode's end, which its deadline bounds.
        """
        assert ticket.uid not in self._tasks, f"episode {ticket.uid} is already in flight"
        work = asyncio.ensure_future(self._run_in_turn(task, ticket))
        self._tasks[ticket.uid] = work
        try:
            return await work
        finally:
            del self._tasks[ticket.uid]

    def truncate(self, uid: EpisodeUid) -> bool:
        """Have an episode end now with what it has, which is then judged; False where it is not in flight.

        One that waits for a place has nothing and is cancelled.
        """
        if uid in self._began:
            self._runner.truncate(uid)
            return True
        return self.cancel(uid)

    @property
    def seconds_in_flight(self) -> dict[EpisodeUid, float]:
        """Seconds since each running episode began, for the watchdog; those that wait for a place are not in it."""
        now = time.monotonic()
        return {uid: now - began for uid, began in self._began.items()}

    def cancel(self, uid: EpisodeUid) -> bool:
        """End an episode (a filter or an update does not want it any more); False where it is not in flight."""
        return uid in self._tasks and _cancel_once(self._tasks[uid])

    async def close(self) -> None:
        """Cancel what is in flight and wait until every environment is closed."""
        tasks = list(self._tasks.values())
        for task in tasks:
            _cancel_once(task)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_in_turn(self, task: Task, ticket: EpisodeTicket) -> Episode:
        async with self._free:
            self._began[ticket.uid] = time.monotonic()
            try:
                return await self._runner.run(task, ticket)
            finally:
                del self._began[ticket.uid]


def _cancel_once(task: asyncio.Task[Episode]) -> bool:
    """A second cancellation would interrupt the closing of the environment, which the first one has begun."""
    return task.cancelling() > 0 or task.cancel()


def _failed(task: Task, failure: Failure) -> LoopResult:
    """A loop that could not even begin, or broke its contract: nothing of it can be judged."""
    return LoopResult(
        outcome=Outcome.INFRA_ERROR,
        trajectories=(),
        messages=task.prompt,
        turn_texts=(),
        counts={f"errors/{failure.name}": 1.0},
        error=failure.error,
    )
