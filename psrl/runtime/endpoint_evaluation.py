"""`psrl eval RECIPE --model URL`: the recipe's agent plays its validation tasks at somebody else's endpoint, in this process.

No engine, no gateway, no Ray: agent loops with sessions, sandboxes and graders are the same as in training, and the agent talks to the
endpoint directly.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from psrl.agent_loops.base import LoopParts, agent_loops
from psrl.agent_loops.mini_swe_server import agent_server
from psrl.agent_loops.runner import EpisodePool
from psrl.agent_loops.session import SessionAgentLoop
from psrl.config.agent_checks import plays_mini_swe
from psrl.config.endpoint import Endpoint
from psrl.config.load import to_yaml
from psrl.config.sandbox import engine_url_of
from psrl.config.tree import Config
from psrl.data_plane import Partition
from psrl.data_plane.memory import meta_of
from psrl.datasets.source import build_validation_tasks
from psrl.errors import ConfigError
from psrl.rewards.base import ScorerParts
from psrl.rewards.scorer import build_scorer
from psrl.runtime.endpoint import EndpointRunner, EndpointSessions, NotHere, look_at
from psrl.runtime.evaluation import EvalSummary
from psrl.runtime.first_prompts import FirstPrompts
from psrl.runtime.group_play import Member
from psrl.runtime.groups import EpisodeSummary, GroupResult, summary_of
from psrl.runtime.lifetime import unless_stopped
from psrl.runtime.measures import validation_metrics
from psrl.runtime.names import resolve_names
from psrl.runtime.shutdown import StopRequest
from psrl.runtime.swe_results import SweResults
from psrl.runtime.tickets import validation_tickets
from psrl.sandbox import BackendSandboxes, limits_of, reap
from psrl.session_client.client import SessionClient
from psrl.telemetry import names
from psrl.telemetry.errors_log import ErrorLog
from psrl.telemetry.progress import ProgressLine
from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.trajectories import TrajectoryWriter
from psrl.types import Episode, EpisodeTicket, EpisodeUid, GroupUid, Outcome, PolicyVersion, SweProblem, Task
from psrl.types.swe import SWE_KEY

NAMED_RUNNING = 3
"""Problems that the line of progress names, those that run longest."""


def evaluate_endpoint(config: Config, endpoint: Endpoint, *, note: Callable[[str], None] = print) -> EvalSummary:
    """Play all validation tasks at the endpoint; Ctrl-C ends it, and says what was played until then.

    Raises:
        PsrlError: What is wrong with settings, endpoint or rows, before anything is played.
    """
    resolve_names(config)
    tasks = build_validation_tasks(config.data, prompt_tokens=None)
    prompts = FirstPrompts(config, cast(Any, NotHere("renderer")), ())
    for task in tasks:
        prompts.check(task)
    for name in {task.agent_name or config.train_actor_rollout_ref.rollout.agent.default_agent_loop for task in tasks}:
        check_loop(name)
    return asyncio.run(_evaluate(config, endpoint, tasks, note))


def check_loop(name: str) -> None:
    """An endpoint can be played at by agents that bring their own client, and by nothing else.

    Raises:
        ConfigError: The loop samples turns itself.
    """
    loop = agent_loops.resolve(name)
    if not (isinstance(loop, type) and issubclass(loop, SessionAgentLoop)):
        rule = f"an endpoint's turns have no token ids, which the loop {name} needs; it serves agents with sessions, such as mini_swe_agent"
        raise ConfigError(key="--model", value=name, rule=rule, fix="name a model folder, or a recipe whose agent has sessions")


async def _evaluate(config: Config, endpoint: Endpoint, tasks: Sequence[Task], note: Callable[[str], None]) -> EvalSummary:
    endpoint = await look_at(endpoint)
    await asyncio.to_thread(reap, engine_url=engine_url_of(config.sandbox))
    folder = RunFolder.create(Path(config.trainer.default_local_dir), config.recipe, datetime.now(), has_processes=False)
    folder.config.write_text(to_yaml(config))
    assert endpoint.model is not None, "it was asked for its name"
    evaluation = EndpointEvaluation(config, endpoint, folder, SweResults(folder.path, model_name=endpoint.model))
    stop = StopRequest(note=note)
    stop.install()
    note(f"{len(tasks)} tasks at {endpoint.url}, model {endpoint.model}; run folder {folder.path}")
    began = time.monotonic()
    stopping = asyncio.create_task(_end_agents(stop.event))
    try:
        await unless_stopped(evaluation.run(tasks), stop.event)
    finally:
        stopping.cancel()
        stop.restore()
    metrics = validation_metrics(evaluation.groups, PolicyVersion(0)) if evaluation.groups else {}
    return EvalSummary(
        run_folder=folder.path,
        num_tasks=len(tasks),
        greedy_accuracy=None,
        mean_at_n_accuracy=metrics.get(names.VAL_MEAN_AT_N_ACCURACY),
        mean_at_n_reward=metrics.get(names.VAL_MEAN_AT_N_REWARD),
        tool_rate=None,
        seconds=time.monotonic() - began,
        stopped_early=stop.event.is_set(),
        swe=evaluation.results.summary(),
    )


async def _end_agents(stop: asyncio.Event) -> None:
    """A process of agents that is not warm yet would hold the end up for as long as it takes to be."""
    await stop.wait()
    agent_server().stop()


class EndpointEvaluation:
    """One pass over the tasks.

    Consumes: the tasks.
    Waits for: all their episodes.
    Unblocked by: each episode's own deadlines.
    """

    def __init__(self, config: Config, endpoint: Endpoint, folder: RunFolder, results: SweResults) -> None:
        """Nothing is started."""
        self._config = config
        self._rollout = config.train_actor_rollout_ref.rollout
        self._endpoint = endpoint
        self._folder = folder
        self.results = results
        self.groups: list[GroupResult] = []
        """Of the tasks that were played."""
        self._names: dict[EpisodeUid, str] = {}
        """Of the problems of episodes that wait or are played."""

    async def run(self, tasks: Sequence[Task]) -> None:
        """Play them all; the sandboxes are gone afterwards, however it ends."""
        config, rollout = self._config, self._rollout
        sandboxes = BackendSandboxes(config.sandbox)
        scorer_parts = ScorerParts(
            reward=config.reward,
            custom=config.custom_reward_function,
            sandboxes=sandboxes,
            allow_network=config.sandbox.allow_network,
        )
        scorer = build_scorer(scorer_parts)
        max_concurrent = rollout.agent.max_concurrent_episodes
        parts = LoopParts(
            renderer=cast(Any, NotHere("renderer")),
            generator=cast(Any, NotHere("generator")),
            sandboxes=sandboxes,
            sandbox_limits=replace(limits_of(config.sandbox), allow_network=config.sandbox.allow_network),
            rollout=rollout,
            sessions=cast(SessionClient, EndpointSessions(self._endpoint)),
        )
        runner = EndpointRunner(parts, scorer, score_timeout_s=config.reward.score_timeout_s(max_concurrent=max_concurrent))
        pool = EpisodePool(runner, max_concurrent=max_concurrent)
        writer = TrajectoryWriter(self._folder.trajectories)
        errors = ErrorLog(self._folder.errors)
        progress = ProgressLine("played", len(tasks))
        telling = asyncio.create_task(self._tell(pool, progress))
        try:
            if plays_mini_swe(rollout):
                await sandboxes.preflight()
            await scorer.self_test()
            async with asyncio.TaskGroup() as group:
                for task in tasks:
                    group.create_task(self._play(task, pool, writer, errors, progress))
        finally:
            telling.cancel()
            await pool.close()
            await scorer.close()
            await asyncio.to_thread(agent_server().close)
            writer.close()
            errors.close()

    async def _tell(self, pool: EpisodePool, progress: ProgressLine) -> None:
        """Waits for: a second at a time. Unblocked by: the end of `run`, which cancels it."""
        while True:
            await asyncio.sleep(1.0)
            progress.show(self._so_far(pool))

    def _so_far(self, pool: EpisodePool) -> str:
        """`2 resolved, now: astropy__astropy-1 95 s, astropy__astropy-2 3 s and 4 more`."""
        running = sorted(
            ((seconds, self._names[uid]) for uid, seconds in pool.seconds_in_flight.items() if uid in self._names), reverse=True
        )
        named = ", ".join(f"{name} {seconds:.0f} s" for seconds, name in running[:NAMED_RUNNING])
        rest = f" and {len(running) - NAMED_RUNNING} more" if len(running) > NAMED_RUNNING else ""
        return f"{self.results.num_resolved} resolved" + (f", now: {named}{rest}" if running else "")

    async def _play(self, task: Task, pool: EpisodePool, writer: TrajectoryWriter, errors: ErrorLog, progress: ProgressLine) -> None:
        seed = self._config.trainer.seed
        tickets = validation_tickets(task, num_sampled=self._rollout.n, is_greedy_too=False, version=PolicyVersion(0), run_seed=seed)
        name = SweProblem.of_task(task).instance_id if SWE_KEY in task.extra_info else task.uid
        self._names |= {ticket.uid: name for ticket in tickets}
        played = await asyncio.gather(*(self._play_again(task, ticket, pool, errors) for ticket in tickets))
        for episode, _ in played:
            writer.write(episode, step=0)
            self.results.add(episode)
        summaries: tuple[EpisodeSummary, ...] = tuple(
            summary_of(Member(ticket=episode.ticket, episode=episode, num_retries=num_retries)) for episode, num_retries in played
        )
        self.groups.append(GroupResult(group=GroupUid(task.uid), summaries=summaries, meta=meta_of([], Partition.TRAIN), records=()))
        for ticket in tickets:
            del self._names[ticket.uid]
        progress.done(self._so_far(pool))

    async def _play_again(self, task: Task, ticket: EpisodeTicket, pool: EpisodePool, errors: ErrorLog) -> tuple[Episode, int]:
        """(the episode, how often it was played again because something else than the model failed)."""
        num_retries = 0
        while True:
            episode = await pool.run(task, ticket)
            is_fault = episode.result.outcome is Outcome.INFRA_ERROR
            if episode.result.error:
                unit = f"{self._names[ticket.uid]} {ticket.uid}"
                errors.record_text(episode.result.outcome.value, episode.result.error, is_retryable=is_fault, unit=unit, step=0)
            if not is_fault or num_retries == self._config.psrl.max_episode_retries:
                return episode, num_retries
            num_retries += 1
