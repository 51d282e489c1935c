"""`psrl train`: the driver. Starts the processes, runs the loops until the last step, a stop or a failure, and ends everything."""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path

from psrl.chat.renderer import HfRenderer
from psrl.config.load import to_yaml
from psrl.config.tree import Config
from psrl.datasets.source import TaskSource
from psrl.runtime.build import Cluster, load_tasks, load_validation_tasks, run_renderer
from psrl.runtime.lifetime import run_with_processes
from psrl.runtime.loops.run import RunLoops
from psrl.runtime.names import resolve_names
from psrl.runtime.recovery import restore_rows, restore_train_workers, save_checkpoint
from psrl.runtime.resume import Resumed, resume_run
from psrl.runtime.resume_point import ResumePoint
from psrl.runtime.run_record import RunRecord, TrainSummary
from psrl.runtime.stored_groups import StoredGroups, StoredPlayer
from psrl.runtime.supervision import answer_of
from psrl.telemetry.run_folder import RunFolder
from psrl.types import PolicyVersion, Task

EXPORT_DEADLINE_S = 600.0


def train(config: Config, *, resume_from: Path | None) -> TrainSummary:
    """Train to the last step; Ctrl-C saves and stops.

    Raises:
        PsrlError: What failed, by name; processes and sandboxes are gone by then.
    """
    resolve_names(config)
    renderer = run_renderer(config)
    stored = StoredGroups.of(config) if config.data.trajectory_files else None
    source = load_tasks(config, renderer) if stored is None else stored.source(config, _validation_tasks(config, renderer))
    if resume_from is None:
        folder = RunFolder.create(Path(config.trainer.default_local_dir), config.recipe, datetime.now())
        folder.hold()
        folder.config.write_text(to_yaml(config))
        point = ResumePoint(step=0, version=PolicyVersion(0), source_state=source.state_dict())
        resumed = None
    else:
        resumed = resume_run(resume_from, config, source)
        folder, point = resumed.folder, resumed.point
    with RunRecord(config, folder, first_step=point.step, decode=renderer.decode) as record:
        for note in resumed.notes if resumed is not None else ():
            record.note(note)
        if stored is not None:
            record.note(str(stored))
        return asyncio.run(Controller(config, record, source=source, stored=stored, point=point, resumed=resumed).run())


def _validation_tasks(config: Config, renderer: HfRenderer) -> list[Task]:
    """None where the settings name none."""
    return load_validation_tasks(config, renderer) if config.data.val_files or config.data.generator.name else []


class Controller:
    """One run, from its processes' start to their end."""

    def __init__(
        self,
        config: Config,
        record: RunRecord,
        *,
        source: TaskSource,
        stored: StoredGroups | None,
        point: ResumePoint,
        resumed: Resumed | None,
    ) -> None:
        """`stored` is trained on instead of playing; `point` is where the run begins; `resumed` has its checkpoint, None: a fresh start."""
        self._config = config
        self._record = record
        self._source = source
        self._stored = stored
        self._point = point
        self._resumed = resumed
        self._saved_step = None if resumed is None else point.step

    async def run(self) -> TrainSummary:
        """Start, train, save, stop. Processes are ended whatever happens."""
        is_stopped = await run_with_processes(self._config, self._record, self._train, with_training=True)
        return self._record.summary(steps=self._point.step, stopped_early=is_stopped)

    async def _train(self, cluster: Cluster, stop: asyncio.Event) -> None:
        config, resumed = self._config, self._resumed
        if resumed is not None:
            deadlines = config.psrl.deadlines
            await restore_train_workers(resumed.checkpoint, train_workers=cluster.train_workers, deadline_s=deadlines.train_step_s)
            await restore_rows(resumed.checkpoint, self._point, data_plane=cluster.data_plane)
            await cluster.push_weights(self._point.version, deadlines.weight_sync_s)
        is_validated = resumed is not None and resumed.is_validated
        loops = RunLoops(
            config,
            cluster,
            self._source,
            self._record,
            player=cluster.workers if self._stored is None else StoredPlayer(self._stored, cluster.data_plane),
            point=self._point,
            is_validated=is_validated,
            save=self._save,
            stop=stop,
        )
        self._point = await loops.run()
        if self._point.step != self._saved_step:
            await self._save(cluster, self._point)
        if not stop.is_set():
            self._record.activity("exporting the model")
            exports = [worker.export.remote(self._record.folder.path / "model") for worker in cluster.train_workers]
            await answer_of("export of the model", asyncio.gather(*exports), EXPORT_DEADLINE_S)

    async def _save(self, cluster: Cluster, point: ResumePoint) -> None:
        self._record.activity(f"saving step {point.step}")
        await save_checkpoint(
            self._record.folder.checkpoints,
            point,
            train_workers=cluster.train_workers,
            data_plane=cluster.data_plane,
            num_kept=self._config.trainer.max_ckpt_to_keep,
            deadline_s=self._config.psrl.deadlines.train_step_s,
        )
        self._saved_step = point.step
