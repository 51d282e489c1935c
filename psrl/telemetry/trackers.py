"""Trackers by name: where the metrics of a run go. `trainer.logger` lists the ones to use."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from psrl.errors import ConfigError
from psrl.protocols import Tracker
from psrl.registry import Registry
from psrl.telemetry.console import has_training, has_validation, metrics_lines
from psrl.telemetry.json_lines import JsonLinesFile
from psrl.telemetry.live import LiveDisplay
from psrl.telemetry.metric_log import MetricLog
from psrl.telemetry.run_folder import RunFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackedRun:
    """What a tracker may know of the run."""

    folder: RunFolder
    project: str = "psrl"
    experiment: str = "run"
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved settings as plain values, for services that show them."""
    resumed_from: int | None = None
    """Step of the checkpoint that this run goes on from; None for a new run."""
    write: Callable[[str], None] = print
    """Where `console` puts its lines when there is no display."""
    display: LiveDisplay | None = None
    """Shows what `console` is given: the table on a terminal, the same lines elsewhere."""


trackers: Registry[Callable[[TrackedRun], Tracker]] = Registry("tracker", key="trainer.logger")


def open_metric_log(names: Sequence[str], run: TrackedRun) -> MetricLog:
    """The log that feeds the trackers of `names`.

    Raises:
        ConfigError: A name is unknown, or its package is not installed.
    """
    return MetricLog([trackers.resolve(name)(run) for name in names])


@trackers.register("console")
class ConsoleTracker:
    """One plain line per step, or the run's live display where it has one."""

    def __init__(self, run: TrackedRun) -> None:
        self._write, self._display = run.write, run.display

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Show the step and, where it was validated, the validation."""
        if self._display is None:
            for line in metrics_lines(metrics, step):
                self._write(line)
            return
        if has_training(metrics):
            self._display.step(metrics, step)
        if has_validation(metrics):
            self._display.validation(metrics, step)

    def close(self) -> None:
        """Nothing is held."""


@trackers.register("jsonl")
class JsonlTracker:
    """`metrics.jsonl`: `{"step", "time", "metrics"}` per call. A resumed run goes on with the file, which the resume has cut."""

    def __init__(self, run: TrackedRun) -> None:
        self._lines = JsonLinesFile(run.folder.metrics)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Append one line."""
        self._lines.append({"step": step, "time": time.time(), "metrics": dict(metrics)})

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


@trackers.register("tensorboard")
class TensorBoardTracker:
    """TensorBoard's event files, written by its own writer: neither torch nor TensorFlow is imported for it."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run.folder.tensorboard), flush_secs=10)
        if run.resumed_from is not None:
            # TensorBoard drops what earlier files hold from the step of a START event on.
            session = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=run.resumed_from + 1, session_log=session))

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """One event with a scalar for each metric."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Flush and end the writer's thread."""
        self._writer.close()


@trackers.register("wandb")
class WandbTracker:
    """Weights & Biases; a resumed run goes on in the same run there."""

    def __init__(self, run: TrackedRun) -> None:
        wandb = _optional_package("wandb")
        run_id = f"{run.folder.recipe}-{run.folder.path.name}"
        self._run = wandb.init(
            project=run.project, name=run.experiment, id=run_id, resume="allow", config=dict(run.config), dir=str(run.folder.logs)
        )

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Log one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Upload what is left."""
        self._run.finish()


@trackers.register("trackio")
class TrackioTracker:
    """Trackio's local dashboard."""

    def __init__(self, run: TrackedRun) -> None:
        trackio = _optional_package("trackio")
        name = f"{run.experiment}-{run.folder.path.name}"
        self._run = trackio.init(project=run.project, name=name, resume="allow", config=dict(run.config))

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Log one step."""
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Flush what is left."""
        self._run.finish()


def _optional_package(name: str) -> ModuleType:
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        fix = f"pip install psrl[{name}], or leave {name} out of trainer.logger"
        raise ConfigError(key="trainer.logger", value=name, rule=f"the package {name} is not installed", fix=fix) from error
