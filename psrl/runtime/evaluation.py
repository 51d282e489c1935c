"""`psrl eval`: validation of a model through the same engines, loops, tools and graders as in training, without a trainer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from psrl.config.load import to_yaml
from psrl.config.tree import Config
from psrl.datasets.source import TaskSource
from psrl.errors import ConfigError, PsrlError
from psrl.runtime.build import load_tasks, make_cluster, run_renderer, start_cluster
from psrl.runtime.cluster import ray_of
from psrl.runtime.controller import cause_in, end_tasks, unless_stopped, validation_of
from psrl.runtime.names import check_registered_names
from psrl.runtime.run_record import RunRecord
from psrl.runtime.shutdown import StopRequest, stop_cluster
from psrl.telemetry import names
from psrl.telemetry.run_folder import RunFolder
from psrl.types import PolicyVersion


@dataclass(frozen=True, kw_only=True)
class EvalSummary:
    """What a model scores."""

    run_folder: Path
    num_tasks: int
    greedy_accuracy: float | None
    mean_at_n_accuracy: float | None
    mean_at_n_reward: float | None
    tool_rate: float | None
    seconds: float


def evaluate(config: Config, *, model_path: str | None) -> EvalSummary:
    """Play all validation tasks with the weights of `model_path`, or with the recipe's.

    Raises:
        PsrlError: What failed, by name; processes and sandboxes are gone by then.
    """
    if model_path is not None:
        config.train_actor_rollout_ref.model.path = model_path
    check_registered_names(config)
    renderer = run_renderer(config)
    source = load_tasks(config, renderer)
    if not source.validation_tasks():
        raise ConfigError(key="data.val_files", value=[], rule="there is no validation task", fix="set data.val_files or a generator")
    folder = RunFolder.create(Path(config.trainer.default_local_dir), config.recipe, datetime.now())
    folder.config.write_text(to_yaml(config))
    with RunRecord(config, folder, first_step=0, decode=renderer.decode) as record:
        return asyncio.run(_evaluate(config, record, source))


async def _evaluate(config: Config, record: RunRecord, source: TaskSource) -> EvalSummary:
    stop = StopRequest(note=record.note)
    stop.install()
    try:
        with ray_of(config):
            stop.install()  # again: Ray takes SIGTERM for itself
            record.started("Ray")
            cluster = make_cluster(config, record.folder.logs, with_training=False)
            try:
                supervisor = await start_cluster(cluster, config, progress=record.started)
                watching = asyncio.create_task(supervisor.run(), name="supervisor")
                record.begin_validation(0)
                validation = validation_of(config, source, cluster, record)
                playing = asyncio.create_task(unless_stopped(validation.run(PolicyVersion(0)), stop.event), name="validation")
                try:
                    done, _ = await asyncio.wait({watching, playing}, return_when=asyncio.FIRST_COMPLETED)
                    if watching in done:
                        watching.result()
                    metrics = playing.result() or {}
                finally:
                    await end_tasks({watching, playing}, config.psrl.deadlines.shutdown_s)
            finally:
                await stop_cluster(cluster, deadline_s=config.psrl.deadlines.shutdown_s)
    except (PsrlError, BaseExceptionGroup) as error:
        cause = cause_in(error)
        record.failed(cause, step=0)
        raise cause from error
    finally:
        stop.restore()
    record.validation(metrics, 0)
    return EvalSummary(
        run_folder=record.folder.path,
        num_tasks=len(source.validation_tasks()),
        greedy_accuracy=metrics.get(names.VAL_GREEDY_ACCURACY),
        mean_at_n_accuracy=metrics.get(names.VAL_MEAN_AT_N_ACCURACY),
        mean_at_n_reward=metrics.get(names.VAL_MEAN_AT_N_REWARD),
        tool_rate=metrics.get(names.VAL_TOOL_RATE),
        seconds=metrics.get(names.VAL_SECONDS, 0.0),
    )
