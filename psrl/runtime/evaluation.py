"""`psrl eval`: validation of a model through the same engines, loops, tools and graders as in training, without a trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from psrl.config.load import to_yaml
from psrl.config.tree import Config
from psrl.runtime.build import Cluster, load_validation_tasks, make_validation, run_renderer
from psrl.runtime.lifetime import run_with_processes, unless_stopped
from psrl.runtime.names import resolve_names
from psrl.runtime.run_record import RunRecord
from psrl.runtime.swe_results import SweResults, SweSummary
from psrl.telemetry import names
from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.val_accuracy import labelled_accuracies
from psrl.types import Episode, PolicyVersion, Task


@dataclass(frozen=True, kw_only=True)
class EvalSummary:
    """What a model scores."""

    run_folder: Path
    num_tasks: int
    greedy_accuracy: float | None
    mean_at_n_accuracy: float | None
    mean_at_n_reward: float | None
    accuracies: tuple[tuple[str, float], ...]
    """(label, value): greedy, mean@n, pass@k, and the latter two of each data source where there are several."""
    tool_rate: float | None
    seconds: float | None
    """Of the validation, without start-up."""
    stopped_early: bool
    """Then not everything was measured."""
    swe: SweSummary | None = None
    """Of tasks that end with a patch."""


def evaluate(config: Config) -> EvalSummary:
    """Play all validation tasks with the weights of the recipe's model.

    Raises:
        PsrlError: What failed, by name; processes and sandboxes are gone by then.
    """
    resolve_names(config)
    renderer = run_renderer(config)
    tasks = load_validation_tasks(config, renderer)
    folder = RunFolder.create(Path(config.trainer.default_local_dir), config.recipe, datetime.now())
    folder.config.write_text(to_yaml(config))
    with RunRecord(config, folder, first_step=0, decode=renderer.decode) as record:
        return asyncio.run(_evaluate(config, record, tasks))


async def _evaluate(config: Config, record: RunRecord, tasks: Sequence[Task]) -> EvalSummary:
    metrics: dict[str, float] = {}
    results = SweResults(record.folder.path, model_name=Path(config.train_actor_rollout_ref.model.path).name)
    recorded: set[str] = set()

    def keep(episode: Episode, step: int) -> None:
        results.add(episode)
        if len(recorded | {episode.task.uid}) <= (config.trainer.trajectories_per_step or len(tasks)):
            recorded.add(episode.task.uid)
            record.episode(episode, step)

    def tell(num_done: int, num_tasks: int) -> None:
        record.activity(f"validating: {num_done}/{num_tasks} tasks")

    async def play(cluster: Cluster, stop: asyncio.Event) -> None:
        record.begin_validation(0)
        validation = make_validation(config, tasks, cluster, record=keep, keeps_all=True, progress=tell)
        measured = await unless_stopped(validation.run(PolicyVersion(0), 0), stop)
        if measured is not None:
            metrics.update(measured)
            record.validation(measured, 0)

    await run_with_processes(config, record, play, with_training=False)
    return EvalSummary(
        run_folder=record.folder.path,
        num_tasks=len(tasks),
        greedy_accuracy=metrics.get(names.VAL_GREEDY_ACCURACY),
        mean_at_n_accuracy=metrics.get(names.VAL_MEAN_AT_N_ACCURACY),
        mean_at_n_reward=metrics.get(names.VAL_MEAN_AT_N_REWARD),
        accuracies=tuple(labelled_accuracies(metrics)),
        tool_rate=metrics.get(names.VAL_TOOL_RATE),
        seconds=metrics.get(names.VAL_SECONDS),
        stopped_early=not metrics,
        swe=results.summary(),
    )
