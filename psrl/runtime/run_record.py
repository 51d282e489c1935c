"""Everything of a run that a person can look at: live view, metrics, episodes, errors, report. One owner, in the driver."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import psutil

from psrl.config.plan import read_model_size
from psrl.config.tree import Config
from psrl.errors import PsrlError
from psrl.runtime.groups import GroupResult
from psrl.telemetry import names
from psrl.telemetry.console import short_number
from psrl.telemetry.errors_log import ErrorLog
from psrl.telemetry.live import LiveDisplay
from psrl.telemetry.report import write_report
from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.trackers import TrackedRun, open_metric_log
from psrl.telemetry.trajectories import TrajectoryWriter
from psrl.types import Episode


@dataclass(frozen=True, kw_only=True)
class TrainSummary:
    """How a run ended."""

    run_folder: Path
    report: Path
    steps: int
    stopped_early: bool
    val_greedy_before: float | None
    val_greedy_after: float | None
    val_mean_at_n_before: float | None
    val_mean_at_n_after: float | None
    first_step_seconds: float | None
    """From the command to the end of the first optimizer step."""
    seconds: float
    """From the command to the end."""


class RunRecord:
    """Writes the run folder and shows the run; a context manager, so that the terminal is given back."""

    def __init__(self, config: Config, folder: RunFolder, *, first_step: int, decode: Callable[[list[int]], str]) -> None:
        self.folder = folder
        self._config = config
        self._first_step = first_step
        self._decode = decode
        self._command_started = psutil.Process().create_time()
        self._first_step_seconds: float | None = None
        self._first_validation: dict[str, float] = {}
        self._last_validation: dict[str, float] = {}
        self._num_recorded = 0
        self._step = first_step
        self.errors = ErrorLog(folder.errors)
        self._trajectories = TrajectoryWriter(folder.trajectories)
        trainer = config.trainer
        self._live = LiveDisplay(
            title=config.recipe,
            total_steps=trainer.total_training_steps,
            model=f"{short_number(read_model_size(config.train_actor_rollout_ref.model.path).num_parameters)} parameters",
            run_folder=folder.path,
            first_step=first_step,
        )
        self._metrics = open_metric_log(
            trainer.logger,
            TrackedRun(
                folder=folder,
                project=trainer.project_name,
                experiment=trainer.experiment_name,
                config=asdict(config),
                resumed_from=first_step or None,
                display=self._live,
            ),
        )

    def __enter__(self) -> RunRecord:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()
        self._metrics.close()
        self._trajectories.close()
        self.errors.close()

    def activity(self, text: str) -> None:
        """What goes on now."""
        self._live.activity(text)

    def started(self, what: str) -> None:
        """A part of the start-up is done; its time since the command is a metric, so that a slow start can be explained."""
        self.activity(f"started {what}")
        self._metrics.log({names.startup_seconds(what): time.time() - self._command_started}, step=self._step)

    def note(self, text: str) -> None:
        """A line that stays."""
        self._live.note(text)

    def wants_records(self) -> bool:
        """Whether the next group's episodes should come back whole."""
        limit = self._config.trainer.trajectories_per_step
        return limit == 0 or self._num_recorded < limit

    def arrived(self, result: GroupResult, *, num_arrived: int) -> None:
        """A group has ended; some are written down."""
        for episode in result.records:
            if self.wants_records():
                self._num_recorded += 1
                self.episode(episode)
        self.activity(f"generating: {num_arrived}/{self._config.data.train_batch_size} groups")

    def episode(self, episode: Episode) -> None:
        """Write one episode into the run folder."""
        pieces = [[self._decode([token]) for token in trajectory.ids()] for trajectory in episode.result.trajectories]
        self._trajectories.write(episode, step=self._step if episode.ticket.is_validation else self._step + 1, pieces=pieces)

    def step(self, metrics: dict[str, float], step: int) -> None:
        """The metrics of a training step."""
        if self._first_step_seconds is None:
            self._first_step_seconds = time.time() - self._command_started
        self._step = step
        self._num_recorded = 0
        self._metrics.log(metrics, step=step)

    def begin_validation(self, step: int) -> None:
        """Validation starts."""
        self._step = step
        self.activity("validating")

    def validation(self, metrics: dict[str, float], step: int) -> None:
        """The metrics of a validation."""
        if step == self._first_step:
            self._first_validation = metrics
        self._last_validation = metrics
        self._metrics.log(metrics, step=step)

    def failed(self, error: PsrlError) -> None:
        """What ended the run."""
        self.errors.record(error, unit="run", step=self._step)

    def summary(self, *, steps: int, stopped_early: bool) -> TrainSummary:
        """Write the report and say how the run ended."""
        self._trajectories.close()
        self._metrics.close()
        report = write_report(self.folder)
        first, last = self._first_validation, self._last_validation
        return TrainSummary(
            run_folder=self.folder.path,
            report=report,
            steps=steps,
            stopped_early=stopped_early,
            val_greedy_before=first.get(names.VAL_GREEDY_ACCURACY),
            val_greedy_after=last.get(names.VAL_GREEDY_ACCURACY),
            val_mean_at_n_before=first.get(names.VAL_MEAN_AT_N_ACCURACY),
            val_mean_at_n_after=last.get(names.VAL_MEAN_AT_N_ACCURACY),
            first_step_seconds=self._first_step_seconds,
            seconds=time.time() - self._command_started,
        )
