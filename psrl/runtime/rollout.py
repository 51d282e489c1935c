"""`psrl rollout`: training tasks played and stored, by the recipe's engines or at an endpoint; `loops/rollout.py` plays them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from psrl.config.endpoint import Endpoint
from psrl.config.load import to_yaml
from psrl.config.resume_rules import changed_settings, check_changes
from psrl.config.tree import Config
from psrl.datasets.source import build_training_tasks, fingerprint_of
from psrl.errors import ConfigError
from psrl.runtime.build import Cluster, group_deadline_s, load_training_tasks, run_renderer
from psrl.runtime.endpoint import look_at
from psrl.runtime.endpoint_worker import EndpointWorker, check_tasks, end_agents, tell_every_second
from psrl.runtime.group_play import Member
from psrl.runtime.groups import EpisodeSummary, GroupRequest, summary_of
from psrl.runtime.lifetime import cause_in, run_with_processes, unless_stopped
from psrl.runtime.loops.rollout import Played, Rollout, RolloutSummary, Sinks
from psrl.runtime.names import resolve_names
from psrl.runtime.run_record import RunRecord
from psrl.runtime.shutdown import StopRequest
from psrl.telemetry.errors_log import ErrorLog
from psrl.telemetry.json_lines import keep_lines
from psrl.telemetry.progress import ProgressLine
from psrl.telemetry.rollout_origin import RolloutOrigin
from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.trackers import TrackedRun, open_metric_log
from psrl.telemetry.trajectories import TRAIN_FILE, TrajectoryWriter, read_trajectories
from psrl.types import EpisodeTicket, GroupUid, Outcome, Task


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedRollout:
    """A run folder, and what lies in it already."""

    folder: RunFolder
    stored: tuple[EpisodeSummary, ...]


def rollout(config: Config, *, resume_from: Path | None) -> RolloutSummary:
    """Play the training tasks with psrl's engines; Ctrl-C ends it and keeps what has ended.

    Raises:
        PsrlError: What failed, by name; processes and sandboxes are gone by then.
    """
    resolve_names(config)
    renderer = run_renderer(config)
    tasks = load_training_tasks(config, renderer)
    opened = _opened(config, _origin_of(config, tasks, endpoint=None), resume_from)
    num_total = len(tasks) * config.psrl.rollout_n
    with RunRecord(config, opened.folder, first_step=len(opened.stored), decode=renderer.decode, total_steps=num_total) as record:
        return asyncio.run(_at_engines(config, tasks, opened, record))


def rollout_at_endpoint(
    config: Config, endpoint: Endpoint, *, resume_from: Path | None, note: Callable[[str], None] = print
) -> RolloutSummary:
    """Play the training tasks at somebody else's model, as `psrl eval` plays those of validation.

    Raises:
        PsrlError: What is wrong with settings, endpoint or rows, before anything is played; later: too many failures.
    """
    resolve_names(config)
    tasks = build_training_tasks(config.data, prompt_tokens=None)
    check_tasks(config, config.gen_actor_rollout_ref.rollout, tasks)
    return asyncio.run(_at_endpoint(config, endpoint, tasks, resume_from, note))


def _origin_of(config: Config, tasks: Sequence[Task], *, endpoint: Endpoint | None) -> RolloutOrigin:
    return RolloutOrigin(
        model=config.train_actor_rollout_ref.model.path if endpoint is None else str(endpoint.model),
        url=None if endpoint is None else endpoint.url,
        key_variable=None if endpoint is None else endpoint.key_variable,
        tasks=fingerprint_of(tasks),
        num_tasks=len(tasks),
    )


def _opened(config: Config, origin: RolloutOrigin, resume_from: Path | None) -> OpenedRollout:
    """A new folder, or that of a stopped rollout; failures that say nothing about the policy are taken out of it, to be played again.

    Raises:
        ConfigError: It is still going on, was of other tasks or of another model, or cannot be read.
    """
    if resume_from is None:
        folder = RunFolder.create(Path(config.trainer.default_local_dir), config.recipe, datetime.now(), has_processes=origin.url is None)
        folder.hold()
        folder.config.write_text(to_yaml(config))
        origin.write(folder)
        return OpenedRollout(folder=folder, stored=())
    folder, before = RunFolder.open(resume_from), RolloutOrigin.read(resume_from)
    check_changes(changed_settings(folder.config, config))
    for name, old, new in (("model", before.model, origin.model), ("url", before.url, origin.url), ("tasks", before.tasks, origin.tasks)):
        if old != new:
            rule = f"the rollout's {name} was {old!r} and is {new!r} now: its episodes would be of two kinds"
            raise ConfigError(key="--resume-from", value=str(resume_from), rule=rule, fix="start a new rollout")
    folder.hold()
    path = folder.trajectories / TRAIN_FILE
    members = (Member(ticket=each.episode.ticket, episode=each.episode, num_retries=0) for each in read_trajectories(path))
    stored = tuple(summary for summary in map(summary_of, members) if summary.outcome.judges_policy)
    keep_lines(path, lambda line: Outcome(line["outcome"]).judges_policy)
    folder.config.write_text(to_yaml(config))
    return OpenedRollout(folder=folder, stored=stored)


async def _at_engines(config: Config, tasks: Sequence[Task], opened: OpenedRollout, record: RunRecord) -> RolloutSummary:
    agent = config.gen_actor_rollout_ref.rollout.agent
    num_at_once = agent.num_workers * agent.max_concurrent_episodes
    sinks = Sinks(
        write=lambda episode: record.episode(episode, 0),
        log=record.step,
        errors=record.errors,
        tell=lambda text, has_ended: record.activity(f"played {text}"),
    )
    work = Rollout(config, tasks, opened.stored, sinks, num_at_once=num_at_once)
    deadline_s = group_deadline_s(config, agent, num_at_once)

    async def play_all(cluster: Cluster, stop: asyncio.Event) -> None:
        num_replicas = cluster.fleet.num_instances
        place_of = {task.uid: index % num_replicas if num_replicas > 1 else None for index, task in enumerate(tasks)}

        async def play(task: Task, ticket: EpisodeTicket) -> Played:
            # Alone in its group: it is stored as soon as it has ended, whatever the others of its task do.
            alone = replace(ticket, group=GroupUid(ticket.uid), instance=place_of[task.uid])
            request = GroupRequest(task=task, tickets=(alone,), wants_records=True, wants_rows=False)
            result = await cluster.workers.play(request, what=f"episode {ticket.uid}", deadline_s=deadline_s)
            (summary,) = result.summaries
            episode = next((replace(each, ticket=ticket) for each in result.records), None)
            return Played(summary=summary, episode=episode)

        await unless_stopped(work.run(play), stop)

    is_stopped = await run_with_processes(config, record, play_all, with_training=False)
    return work.summary(opened.folder.path, stopped_early=is_stopped, is_captured=True)


async def _at_endpoint(
    config: Config, endpoint: Endpoint, tasks: Sequence[Task], resume_from: Path | None, note: Callable[[str], None]
) -> RolloutSummary:
    endpoint = await look_at(endpoint)
    opened = _opened(config, _origin_of(config, tasks, endpoint=endpoint), resume_from)
    folder, rollout_settings = opened.folder, config.gen_actor_rollout_ref.rollout
    stop = StopRequest(note=note)
    stop.install()
    num_total = len(tasks) * config.psrl.rollout_n
    note(f"{num_total} episodes of {len(tasks)} tasks at {endpoint.url}, model {endpoint.model}; run folder {folder.path}")
    writer, errors = TrajectoryWriter(folder.trajectories), ErrorLog(folder.errors)
    metrics = open_metric_log(["jsonl"], TrackedRun(folder=folder))

    def log(values: dict[str, float], step: int) -> None:
        metrics.log(values, step=step)

    sinks = Sinks(
        write=lambda episode: writer.write(episode, step=0),
        log=log,
        errors=errors,
        tell=lambda text, has_ended: progress.done(text) if has_ended else progress.show(text),
    )
    work = Rollout(config, tasks, opened.stored, sinks, num_at_once=rollout_settings.agent.max_concurrent_episodes)
    progress = ProgressLine("played", work.num_left)
    ending = asyncio.create_task(end_agents(stop.event))
    try:
        async with EndpointWorker(config, rollout_settings, endpoint, errors) as worker:
            tell = asyncio.create_task(tell_every_second(lambda: sinks.tell(f"{work.so_far()}, {worker.running()}", False)))

            async def play(task: Task, ticket: EpisodeTicket) -> Played:
                return Played.of(await worker.play(task, ticket))

            try:
                await unless_stopped(work.run(play), stop.event)
            finally:
                tell.cancel()
    except BaseExceptionGroup as error:
        raise cause_in(error) from error
    finally:
        ending.cancel()
        stop.restore()
        for sink in (writer, errors, metrics):
            sink.close()
    return work.summary(folder.path, stopped_early=stop.event.is_set(), is_captured=False)
