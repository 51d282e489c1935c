"""`psrl eval RECIPE --model URL`: the recipe's agent plays its validation tasks at somebody else's endpoint, in this process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from psrl.config.endpoint import Endpoint
from psrl.config.load import to_yaml
from psrl.config.tree import Config
from psrl.data_plane.memory import meta_of
from psrl.datasets.source import build_validation_tasks
from psrl.runtime.endpoint import look_at
from psrl.runtime.endpoint_worker import EndpointWorker, check_tasks, end_agents, name_of, tell_every_second
from psrl.runtime.evaluation import EvalSummary
from psrl.runtime.groups import GroupResult, summary_of
from psrl.runtime.lifetime import unless_stopped
from psrl.runtime.measures import validation_metrics
from psrl.runtime.names import resolve_names
from psrl.runtime.shutdown import StopRequest
from psrl.runtime.swe_results import SweResults
from psrl.runtime.tickets import validation_tickets
from psrl.telemetry import names
from psrl.telemetry.errors_log import ErrorLog
from psrl.telemetry.progress import ProgressLine
from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.trajectories import TrajectoryWriter
from psrl.telemetry.val_accuracy import labelled_accuracies
from psrl.types import GroupUid, Outcome, PolicyVersion, Task


def evaluate_endpoint(config: Config, endpoint: Endpoint, *, note: Callable[[str], None] = print) -> EvalSummary:
    """Play all validation tasks at the endpoint; Ctrl-C ends it, and says what was played until then.

    Raises:
        PsrlError: What is wrong with settings, endpoint or rows, before anything is played.
    """
    resolve_names(config)
    tasks = build_validation_tasks(config.data, prompt_tokens=None)
    check_tasks(config, config.train_actor_rollout_ref.rollout, tasks)
    return asyncio.run(_evaluate(config, endpoint, tasks, note))


async def _evaluate(config: Config, endpoint: Endpoint, tasks: Sequence[Task], note: Callable[[str], None]) -> EvalSummary:
    endpoint = await look_at(endpoint)
    folder = RunFolder.create(Path(config.trainer.default_local_dir), config.recipe, datetime.now(), has_processes=False)
    folder.config.write_text(to_yaml(config))
    assert endpoint.model is not None, "it was asked for its name"
    evaluation = EndpointEvaluation(config, endpoint, folder, SweResults(folder.path, model_name=endpoint.model))
    stop = StopRequest(note=note)
    stop.install()
    note(f"{len(tasks)} tasks at {endpoint.url}, model {endpoint.model}; run folder {folder.path}")
    began = time.monotonic()
    stopping = asyncio.create_task(end_agents(stop.event))
    try:
        await unless_stopped(evaluation.run(tasks), stop.event)
    finally:
        stopping.cancel()
        stop.restore()
    sources = {GroupUid(task.uid): task.data_source for task in tasks}
    metrics = validation_metrics(evaluation.groups, PolicyVersion(0), sources=sources) if evaluation.groups else {}
    return EvalSummary(
        run_folder=folder.path,
        num_tasks=len(tasks),
        greedy_accuracy=None,
        mean_at_n_accuracy=metrics.get(names.VAL_MEAN_AT_N_ACCURACY),
        mean_at_n_reward=metrics.get(names.VAL_MEAN_AT_N_REWARD),
        accuracies=tuple(labelled_accuracies(metrics)),
        tool_rate=None,
        seconds=time.monotonic() - began,
        stopped_early=stop.event.is_set(),
        swe=evaluation.results.summary(),
    )


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

    async def run(self, tasks: Sequence[Task]) -> None:
        """Play them all."""
        writer = TrajectoryWriter(self._folder.trajectories)
        errors = ErrorLog(self._folder.errors)
        progress = ProgressLine("played", len(tasks))
        try:
            async with EndpointWorker(self._config, self._rollout, self._endpoint, errors) as worker:
                telling = asyncio.create_task(tell_every_second(lambda: progress.show(self._so_far(worker))))
                try:
                    async with asyncio.TaskGroup() as group:
                        for task in tasks:
                            group.create_task(self._play(task, worker, writer, errors, progress))
                finally:
                    telling.cancel()
        finally:
            writer.close()
            errors.close()

    def _so_far(self, worker: EndpointWorker) -> str:
        return ", ".join(filter(None, (f"{self.results.num_resolved} resolved", worker.running())))

    async def _play(self, task: Task, worker: EndpointWorker, writer: TrajectoryWriter, errors: ErrorLog, progress: ProgressLine) -> None:
        seed = self._config.trainer.seed
        tickets = validation_tickets(task, num_sampled=self._rollout.n, is_greedy_too=False, version=PolicyVersion(0), run_seed=seed)
        members = await asyncio.gather(*(worker.play(task, ticket) for ticket in tickets))
        for member in members:
            episode = member.episode
            assert episode is not None, f"{member.ticket.uid} has an end of its own"
            writer.write(episode, step=0)
            self.results.add(episode)
            if episode.result.error:
                outcome, unit = episode.result.outcome, f"{name_of(task)} {member.ticket.uid}"
                errors.record_text(outcome.value, episode.result.error, is_retryable=outcome is Outcome.INFRA_ERROR, unit=unit, step=0)
        summaries = tuple(map(summary_of, members))
        self.groups.append(GroupResult(group=GroupUid(task.uid), summaries=summaries, meta=meta_of([]), records=()))
        progress.done(self._so_far(worker))
