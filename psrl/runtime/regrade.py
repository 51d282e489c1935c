"""`psrl regrade`: rewards again from stored episodes. Nothing is generated, and nothing that is stored is changed.

The new file holds the same episodes in the same order, whole, with their new scores: whatever reads stored episodes reads it too.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from psrl.agent_loops.runner import judged
from psrl.config.load import to_yaml
from psrl.config.sandbox import engine_url_of
from psrl.config.tree import Config
from psrl.errors import ConfigError
from psrl.protocols import Scorer
from psrl.rewards.base import ScorerParts
from psrl.rewards.scorer import build_scorer
from psrl.runtime.failures import FailureLimit
from psrl.runtime.group_play import Member
from psrl.runtime.groups import summary_of
from psrl.runtime.lifetime import unless_stopped
from psrl.runtime.names import resolve_names
from psrl.runtime.score_changes import ScoreChanges
from psrl.runtime.shutdown import StopRequest
from psrl.sandbox import BackendSandboxes, reap
from psrl.telemetry.errors_log import ErrorLog
from psrl.telemetry.json_lines import JsonLinesFile
from psrl.telemetry.progress import ProgressLine
from psrl.telemetry.run_folder import UNFINISHED_SUFFIX
from psrl.telemetry.trajectories import EpisodeRecord, line_of, read_trajectories
from psrl.types import Episode, LoopResult, Outcome

_REGRADED = re.compile(r"\.regraded-\d+$")
ENDED_BY_ITSELF = (Outcome.FINISHED, Outcome.MAX_TURNS, Outcome.MAX_TOKENS)
"""Outcomes without a failure of their own: what such an episode's error says is its old grader's."""


@dataclass(frozen=True, kw_only=True)
class RegradeSummary:
    """What a regrade made."""

    source: Path
    written: Path
    num_episodes: int
    seconds: float
    stopped_early: bool
    """Then the file holds the first episodes only."""
    changes: ScoreChanges


def regrade(config: Config, source: Path, *, note: Callable[[str], None] = print) -> RegradeSummary:
    """Grade every episode of the file `source` by `reward` of the settings, into a new file beside it; Ctrl-C keeps what is graded.

    After a failure the file keeps `.unfinished` behind its name, so that nobody takes it for whole.

    Raises:
        ConfigError: A line is no stored episode, there is none, or the grader is not as configured.
        PsrlError: The grader does not work here, or fails on too many episodes.
    """
    resolve_names(config)
    num_episodes = sum(1 for _ in read_trajectories(source))
    if num_episodes == 0:
        rule, fix = "holds no episode", "name a run folder or a file trajectories/*.jsonl with episodes"
        raise ConfigError(key="RUN", value=str(source), rule=rule, fix=fix)
    return asyncio.run(_regrade(config, source, num_episodes, note))


def new_file(source: Path) -> Path:
    """The first free name beside `source`.

    Example:
        train.jsonl, or train.regraded-1.jsonl, where train.regraded-1.jsonl is there -> train.regraded-2.jsonl
    """
    stem, number = _REGRADED.sub("", source.stem), 1
    while True:
        path = source.with_name(f"{stem}.regraded-{number}.jsonl")
        if not path.exists() and not _unfinished(path).exists():
            return path
        number += 1


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + UNFINISHED_SUFFIX)


async def _regrade(config: Config, source: Path, num_episodes: int, note: Callable[[str], None]) -> RegradeSummary:
    await asyncio.to_thread(reap, engine_url=engine_url_of(config.sandbox))
    path = new_file(source)
    note(f"grading {num_episodes} episodes of {source} again by reward.name={config.reward.name}")
    parts = ScorerParts(
        reward=config.reward,
        custom=config.custom_reward_function,
        sandboxes=BackendSandboxes(config.sandbox),
        allow_network=config.sandbox.allow_network,
    )
    stop = StopRequest(note=note)
    stop.install()
    began = time.monotonic()
    scorer = build_scorer(parts)
    lines, errors = JsonLinesFile(_unfinished(path)), ErrorLog(path.with_suffix(".errors.jsonl"))
    work = Regrade(config, scorer, lines, FailureLimit(errors, max_rate=config.psrl.max_infra_error_rate))
    progress = ProgressLine("graded", num_episodes)
    has_failed = True
    try:
        await scorer.self_test()
        await unless_stopped(work.run(read_trajectories(source), lambda: progress.done(str(work.changes))), stop.event)
        has_failed = False
    finally:
        stop.restore()
        lines.close()
        errors.close()
        await scorer.close()
        if not work.changes.num_episodes:
            _unfinished(path).unlink()
        elif not has_failed:
            _unfinished(path).rename(path)
            path.with_suffix(".yaml").write_text(to_yaml(config))
    return RegradeSummary(
        source=source,
        written=path,
        num_episodes=work.changes.num_episodes,
        seconds=time.monotonic() - began,
        stopped_early=stop.event.is_set(),
        changes=work.changes,
    )


class Regrade:
    """One pass over stored episodes.

    Consumes: the episodes, in order.
    Waits for: their grades, as many at once as a run's agent worker plays episodes; they are written in order.
    Unblocked by: the grader, or the time-out of a score.
    """

    def __init__(self, config: Config, scorer: Scorer, lines: JsonLinesFile, failures: FailureLimit) -> None:
        """New lines go to `lines`."""
        self._scorer, self._lines, self._failures = scorer, lines, failures
        self._num_at_once = config.gen_actor_rollout_ref.rollout.agent.max_concurrent_episodes
        self._timeout_s = config.reward.score_timeout_s(max_concurrent=self._num_at_once)
        self.changes = ScoreChanges()

    async def run(self, records: Iterator[EpisodeRecord], done: Callable[[], None]) -> None:
        """Grade all of them; `done` is called after each. A cancellation ends the gradings that run.

        Raises:
            TooManyFailuresError: The grader fails on too many.
        """
        window: deque[tuple[EpisodeRecord, asyncio.Task[Episode]]] = deque()
        try:
            for record in records:
                window.append((record, asyncio.create_task(self._graded(record.episode))))
                if len(window) >= self._num_at_once:
                    await self._keep_oldest(window, done)
            while window:
                await self._keep_oldest(window, done)
        finally:
            for _, grading in window:
                grading.cancel()
            await asyncio.gather(*(grading for _, grading in window), return_exceptions=True)

    async def _keep_oldest(self, window: deque[tuple[EpisodeRecord, asyncio.Task[Episode]]], done: Callable[[], None]) -> None:
        record, grading = window[0]
        episode = await grading
        window.popleft()
        self._lines.append(line_of(episode, step=record.step, pieces=record.pieces))
        self.changes.add(record.episode, episode)
        if episode.result.outcome.judges_policy:
            self._failures.count([summary_of(Member(ticket=episode.ticket, episode=episode, num_retries=0))], step=record.step)
        done()

    async def _graded(self, episode: Episode) -> Episode:
        result = episode.result if episode.score.reward is not None else without_grading_error(episode.result)
        score, result = await judged(self._scorer, episode.task, result, timeout_s=self._timeout_s)
        return replace(episode, score=score, result=result)


def without_grading_error(result: LoopResult) -> LoopResult:
    """The result of an episode that an earlier grader failed on, as it was before."""
    if result.outcome not in ENDED_BY_ITSELF:
        return result
    counts = {name: value for name, value in result.counts.items() if not name.startswith("errors/")}
    return replace(result, counts=counts, error=None)
