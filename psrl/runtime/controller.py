"""`psrl train`: the driver. Starts the processes, runs the loops until the last step, a stop or a failure, and ends everything.

    feed --groups--> agent workers --results--> assemble --ready buffers--> train --weights--> replicas
      ^                                            |                          |
      +------------- free slots (board) -----------+------ new version -------+

Each loop's docstring says what it consumes, what it waits for and who unblocks it.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path

from psrl.config.load import to_yaml
from psrl.config.tree import Config
from psrl.datasets.source import TaskSource
from psrl.errors import ConfigError
from psrl.runtime.board import Board
from psrl.runtime.build import Cluster, group_deadline_s, load_tasks, make_validation, run_renderer
from psrl.runtime.groups import GroupResult
from psrl.runtime.lifetime import end_tasks, run_with_processes, unless_stopped
from psrl.runtime.loops.assemble import AssembleLoop
from psrl.runtime.loops.feed import FeedLoop
from psrl.runtime.loops.sync import sync_weights
from psrl.runtime.loops.train import TrainLoop
from psrl.runtime.loops.validate import Validation
from psrl.runtime.names import resolve_names
from psrl.runtime.recovery import ResumePoint, checkpoints_in, read_resume_point, restore_train_workers, save_checkpoint
from psrl.runtime.run_record import RunRecord, TrainSummary
from psrl.runtime.supervision import answer_of
from psrl.staleness import StalenessLedger
from psrl.telemetry.run_folder import RunFolder
from psrl.types import PolicyVersion

MAX_ARRIVALS = 1024
"""Groups that may wait for the assemble loop."""
EXPORT_DEADLINE_S = 600.0


def train(config: Config, *, resume_from: Path | None) -> TrainSummary:
    """Train to the last step; Ctrl-C saves and stops.

    Raises:
        PsrlError: What failed, by name; processes and sandboxes are gone by then.
    """
    resolve_names(config)
    renderer = run_renderer(config)
    source = load_tasks(config, renderer)
    if resume_from is None:
        folder, checkpoint = RunFolder.create(Path(config.trainer.default_local_dir), config.recipe, datetime.now()), None
        folder.config.write_text(to_yaml(config))
        point = ResumePoint(step=0, version=PolicyVersion(0), source_state=source.state_dict())
    else:
        folder = RunFolder.open(resume_from)
        checkpoint = last_checkpoint(folder)
        point = read_resume_point(checkpoint)
        source.load_state_dict(point.source_state)
    with RunRecord(config, folder, first_step=point.step, decode=renderer.decode) as record:
        return asyncio.run(Controller(config, record, source=source, point=point, checkpoint=checkpoint).run())


def last_checkpoint(folder: RunFolder) -> Path:
    """The newest complete checkpoint of a run."""
    found = checkpoints_in(folder.checkpoints)
    if not found:
        rule = "the run has no checkpoint"
        raise ConfigError(key="--resume-from", value=str(folder.path), rule=rule, fix="start it again without --resume")
    return found[-1]


class Controller:
    """One run, from its processes' start to their end."""

    def __init__(self, config: Config, record: RunRecord, *, source: TaskSource, point: ResumePoint, checkpoint: Path | None) -> None:
        """`point` is where the run begins; `checkpoint` holds its weights, None for a fresh start."""
        self._config = config
        self._record = record
        self._source = source
        self._point = point
        self._checkpoint = checkpoint
        self._is_saved = checkpoint is not None

    async def run(self) -> TrainSummary:
        """Start, train, save, stop. Processes are ended whatever happens."""
        is_stopped = await run_with_processes(self._config, self._record, self._train, with_training=True)
        return self._record.summary(steps=self._point.step, stopped_early=is_stopped)

    async def _train(self, cluster: Cluster, stop: asyncio.Event) -> None:
        config = self._config
        if self._checkpoint is not None:
            await restore_train_workers(self._checkpoint, train_workers=cluster.train_workers, deadline_s=config.psrl.deadlines.startup_s)
            await self._sync(cluster, self._point.version)
        validation = make_validation(config, self._source.validation_tasks(), cluster, record=self._record.episode)
        if config.trainer.val_before_train and self._checkpoint is None:
            await self._validate(validation, self._point.version, 0, stop)
        await self._run_loops(cluster, validation, stop)
        if not self._is_saved:
            await self._save(cluster)
        if not stop.is_set():
            self._record.activity("exporting the model")
            exports = [worker.export.remote(self._record.folder.path / "model") for worker in cluster.train_workers]
            await answer_of("export of the model", asyncio.gather(*exports), EXPORT_DEADLINE_S)

    async def _run_loops(self, cluster: Cluster, validation: Validation, stop: asyncio.Event) -> None:
        config, point = self._config, self._point
        ledger = StalenessLedger(staleness=config.psrl.staleness, groups_per_buffer=config.data.train_batch_size, version=point.version)
        board = Board(ledger)
        arrivals: asyncio.Queue[GroupResult] = asyncio.Queue(MAX_ARRIVALS)
        feed = FeedLoop(
            source=self._source,
            board=board,
            workers=cluster.agent_workers,
            arrivals=arrivals,
            rollout_n=config.psrl.rollout_n,
            run_seed=config.trainer.seed,
            group_deadline_s=group_deadline_s(config, config.gen_actor_rollout_ref.rollout.agent, config.psrl.rollout_n),
            wants_records=self._record.wants_records,
        )
        assemble = AssembleLoop(
            board=board,
            arrivals=arrivals,
            data_plane=cluster.data_plane,
            settings=config.psrl,
            filter_groups=config.algorithm.filter_groups,
            groups_per_step=config.data.train_batch_size,
            errors=self._record.errors,
            report=lambda result: self._record.arrived(result, num_arrived=board.num_arrived + 1),
        )

        async def after_step(step: int, metrics: dict[str, float]) -> None:
            version = PolicyVersion(board.version + 1)
            self._point = ResumePoint(step=step, version=version, source_state=feed.pending_state)
            self._is_saved = False
            self._record.step(metrics, step)
            if self._is_due(config.trainer.test_freq, step):
                await self._validate(validation, version, step, stop)
            if config.trainer.save_freq and step % config.trainer.save_freq == 0:
                await self._save(cluster)

        train = TrainLoop(
            board=board,
            data_plane=cluster.data_plane,
            workers=cluster.train_workers,
            sync=lambda version: self._sync(cluster, version),
            after_step=after_step,
            take_group_metrics=assemble.take_metrics,
            activity=self._record.activity,
            step_deadline_s=config.psrl.deadlines.train_step_s,
            stop=stop,
        )
        steps = train.run(first_step=point.step + 1, last_step=config.trainer.total_training_steps)
        tasks = {
            asyncio.create_task(work, name=name) for name, work in (("feed", feed.run()), ("assemble", assemble.run()), ("train", steps))
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await end_tasks(tasks, config.psrl.deadlines.shutdown_s)

    def _is_due(self, every: int, step: int) -> bool:
        return step == self._config.trainer.total_training_steps or (every > 0 and step % every == 0)

    async def _validate(self, validation: Validation, version: PolicyVersion, step: int, stop: asyncio.Event) -> None:
        self._record.begin_validation(step)
        metrics = await unless_stopped(validation.run(version), stop)
        if metrics is not None:
            self._record.validation(metrics, step)

    async def _sync(self, cluster: Cluster, version: PolicyVersion) -> None:
        await sync_weights(
            train_workers=cluster.train_workers,
            parameter_server=cluster.parameter_server,
            replicas=cluster.replicas,
            version=version,
            deadline_s=self._config.psrl.deadlines.weight_sync_s,
        )

    async def _save(self, cluster: Cluster) -> None:
        self._record.activity(f"saving step {self._point.step}")
        await save_checkpoint(
            self._record.folder.checkpoints,
            self._point,
            train_workers=cluster.train_workers,
            num_kept=self._config.trainer.max_ckpt_to_keep,
            deadline_s=self._config.psrl.deadlines.train_step_s,
        )
        self._is_saved = True
