"""Everything of a run that a person can look at: live view, metrics, episodes, errors, report. One owner, in the driver."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import psutil

from psrl.config.model_size import read_model_size
from psrl.config.tree import Config
from psrl.errors import ProcessDiedError, PsrlError
from psrl.runtime.board import ReadyBuffer
from psrl.runtime.groups import GroupResult
from psrl.telemetry import names
from psrl.telemetry.console import short_number
from psrl.telemetry.errors_log import ErrorLog
from psrl.telemetry.group_log import Fate, GroupFate, GroupLog
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

    def __init__(
        self, config: Config, folder: RunFolder, *, first_step: int, decode: Callable[[list[int]], str], total_steps: int | None = None
    ) -> None:
        """`total_steps`: where the run ends, `trainer.total_training_steps` unless given."""
        self.folder = folder
        self._config = config
        self._first_step = first_step
        self._decode = decode
        self._command_started = psutil.Process().create_time()
        self._first_step_seconds: float | None = None
        self._first_validation: dict[str, float] = {}
        self._last_validation: dict[str, float] = {}
        self._texts: dict[int, str] = {}
        self._num_recorded = self._num_promised = 0
        self._step = first_step
        self.errors = ErrorLog(folder.errors)
        self._trajectories = TrajectoryWriter(folder.trajectories)
        self._groups = GroupLog(folder.groups)
        self._activities = {"trainer": "", "rollout": ""}
        trainer = config.trainer
        self._live = LiveDisplay(
            title=config.recipe,
            total_steps=trainer.total_training_steps if total_steps is None else total_steps,
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
        self._groups.close()
        self.errors.close()

    def activity(self, text: str) -> None:
        """What the trainer, or the whole run, does now."""
        self._show("trainer", text)

    def rollout_activity(self, text: str) -> None:
        """What goes on beside the trainer."""
        self._show("rollout", text)

    def _show(self, who: str, text: str) -> None:
        self._activities[who] = text
        self._live.activity(" | ".join(filter(None, self._activities.values())))

    def started(self, what: str) -> None:
        """A part of the start-up is done; its time since the command is a metric, so that a slow start can be explained."""
        self.activity(f"started {what}")
        self._metrics.log({names.startup_seconds(what): time.time() - self._command_started}, step=self._step)

    def note(self, text: str) -> None:
        """A line that stays."""
        self._live.note(text)

    def wants_records(self) -> bool:
        """Whether the episodes of the group that is admitted now should come back whole."""
        limit = self._config.trainer.trajectories_per_step
        is_wanted = limit == 0 or self._num_promised < limit
        self._num_promised += self._config.psrl.rollout_n
        return is_wanted

    def arrived(self, result: GroupResult) -> None:
        """A group has ended; some are written down."""
        limit = self._config.trainer.trajectories_per_step
        for episode in result.records:
            if limit == 0 or self._num_recorded < limit:
                self._num_recorded += 1
                self.episode(episode, self._step + 1)

    def episode(self, episode: Episode, step: int) -> None:
        """Write an episode: of training in the step that it is for, of validation after the step whose weights played it."""
        pieces = [[self._text_of(token) for token in trajectory.ids()] for trajectory in episode.result.trajectories]
        self._trajectories.write(episode, step=step, pieces=pieces)

    def _text_of(self, token: int) -> str:
        """Remembered, because decoding a long episode token by token would hold up the loops for half a second."""
        if token not in self._texts:
            self._texts[token] = self._decode([token])
        return self._texts[token]

    def trained(self, ready: ReadyBuffer, step: int) -> None:
        """What a step trained on."""
        for result in ready.groups:
            self._groups.write(
                GroupFate(
                    uid=result.group,
                    fate=Fate.TRAINED,
                    step=step,
                    admitted_version=ready.consumed.admitted[result.group],
                    buffer_version=ready.consumed.version,
                    oldest_version=result.oldest_version,
                    attempt=result.attempt,
                )
            )

    def left_out(self, fate: GroupFate) -> None:
        """A group that will never be trained on."""
        self._groups.write(fate)

    def step(self, metrics: dict[str, float], step: int) -> None:
        """The metrics of a training step."""
        if self._first_step_seconds is None:
            self._first_step_seconds = time.time() - self._command_started
        self._step = step
        self._num_recorded = self._num_promised = 0
        self._metrics.log(metrics, step=step)

    def begin_validation(self, step: int) -> None:
        """Validation starts."""
        self.rollout_activity(f"validating step {step}")

    def validation(self, metrics: dict[str, float], step: int) -> None:
        """The metrics of a validation."""
        if step == self._first_step:
            self._first_validation = metrics
        self._last_validation = metrics
        self._metrics.log(metrics, step=step)

    def died(self, process: str, cause: str) -> None:
        """A process of the run died and is started again."""
        self.errors.record_text(ProcessDiedError.__name__, cause, is_retryable=True, unit=process, step=self._step)
        self.note(f"{process} died and is started again: {cause.splitlines()[0][:200]}")

    def sync_failed(self, instance: int, error: PsrlError) -> None:
        """An instance took no weights; it is asked again."""
        self.errors.record(error, unit=f"sync of instance {instance}", step=self._step)

    def stalled(self, report: str) -> None:
        """Nothing has ended for a while."""
        self.errors.record_text("Stalled", report, is_retryable=True, unit="run", step=self._step)
        self.note(report)

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
