"""The folder of one run: `<root>/<recipe>/<start time>/`, and where everything lies in it.

config.yaml            the resolved settings
metrics.jsonl          one line per logged step
groups.jsonl           what became of every training group
tensorboard/           the same for TensorBoard
trajectories/*.jsonl   every kept episode: train.jsonl, val.jsonl
rollout.json           of `psrl rollout`: what it plays, and at which model
predictions.json       of an evaluation of problems: the patches, in SWE-bench's format
results.json           of the same: each problem's verdict
errors.jsonl           what failed, when, and whether trying again can help
checkpoints/           what a resume goes on from
resumes.jsonl          when the run was resumed, from where, with which settings changed
report.html            the run on one page
logs/                  output of the run's processes
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from psrl.errors import ConfigError
from psrl.telemetry.json_lines import keep_lines, read_json_lines
from psrl.telemetry.names import VAL_SECONDS
from psrl.telemetry.trajectories import TRAIN_FILE, VAL_FILE

UNFINISHED_SUFFIX = ".unfinished"
"""Of a checkpoint's folder while it is written; what a crash leaves under such a name is no checkpoint."""
CUT_BY_LENGTH = ("groups.jsonl", f"trajectories/{TRAIN_FILE}")
_STARTED = "%Y-%m-%d_%H-%M-%S"
_FOLDER_NAME = re.compile(r"(\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d)(?:-(\d+))?")
_RECIPE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@-]*")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """One run's folder; the parts need not exist yet."""

    path: Path

    @classmethod
    def create(cls, root: Path, recipe: str, started: datetime, *, has_processes: bool = True) -> RunFolder:
        """Make a new folder; runs that start in the same second get `-2`, `-3`, ... behind the time.

        Without processes (an evaluation at somebody else's endpoint) there are no logs, checkpoints and curves.

        Raises:
            ConfigError: `recipe` is no plain name.
        """
        parent = _recipe_folder(root, recipe)
        parent.mkdir(parents=True, exist_ok=True)
        name = started.strftime(_STARTED)
        number = 1
        while True:
            path = parent / (name if number == 1 else f"{name}-{number}")
            try:
                path.mkdir()
            except FileExistsError:
                number += 1
                continue
            run = cls(path)
            for folder in (run.trajectories, *((run.tensorboard, run.checkpoints, run.logs) if has_processes else ())):
                folder.mkdir()
            return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """An existing folder.

        Raises:
            ConfigError: It is not there or holds no run.
        """
        run = cls(Path(path))
        if not run.path.is_dir():
            raise ConfigError(key="run_folder", value=str(path), rule="there is no such folder", fix="give the folder of a run")
        if not (run.config.exists() or run.metrics.exists() or run.trajectories.is_dir()):
            fix = "give <root>/<recipe>/<start time>"
            raise ConfigError(key="run_folder", value=str(path), rule="the folder holds no run", fix=fix)
        return run

    @classmethod
    def latest(cls, root: Path, recipe: str, *, with_checkpoint: bool = False) -> RunFolder | None:
        """The run of `recipe` that started last, or None.

        `with_checkpoint` passes over runs without a checkpoint: a start that failed must not hide the run to resume.
        """
        runs = cls.all(root, recipe)
        if with_checkpoint:
            runs = [run for run in runs if run.has_checkpoint]
        return runs[-1] if runs else None

    @classmethod
    def all(cls, root: Path, recipe: str) -> list[RunFolder]:
        """Runs of `recipe`, the oldest first."""
        parent = _recipe_folder(root, recipe)
        found = []
        for path in parent.iterdir() if parent.is_dir() else ():
            match = _FOLDER_NAME.fullmatch(path.name)
            if match and path.is_dir():
                found.append((match[1], int(match[2] or 1), path))
        return [cls(path) for _, _, path in sorted(found)]

    @property
    def recipe(self) -> str:
        """Name of the recipe that ran."""
        return self.path.resolve().parent.name

    @property
    def config(self) -> Path:
        """The resolved settings, YAML."""
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One line per logged step; `metric_log.read_metrics` reads it."""
        return self.path / "metrics.jsonl"

    @property
    def groups(self) -> Path:
        """What became of every training group; `group_log.read_group_log` reads it."""
        return self.path / "groups.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Event files."""
        return self.path / "tensorboard"

    @property
    def trajectories(self) -> Path:
        """Folder of `train.jsonl` and `val.jsonl`."""
        return self.path / "trajectories"

    @property
    def rollout(self) -> Path:
        """What a rollout plays; only rollouts have it."""
        return self.path / "rollout.json"

    @property
    def errors(self) -> Path:
        """What failed; `errors_log.read_errors` reads it."""
        return self.path / "errors.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def resumes(self) -> Path:
        """When the run was resumed."""
        return self.path / "resumes.jsonl"

    @property
    def report(self) -> Path:
        """The run on one page."""
        return self.path / "report.html"

    @property
    def logs(self) -> Path:
        """Output of the run's processes."""
        return self.path / "logs"

    @property
    def has_checkpoint(self) -> bool:
        """Whether anything was saved; unfinished and damaged checkpoints have a suffix."""
        found = self.checkpoints.iterdir() if self.checkpoints.is_dir() else ()
        return any(not path.suffix for path in found)

    def hold(self) -> None:
        """Keep the run for this process until its end, however it ends.

        Raises:
            ConfigError: Another process has it: two of them would write over each other.
        """
        # Never closed: the lock is the open file, and the kernel gives it back when the process is gone, also after kill -9.
        descriptor = os.open(self.path / ".held", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            rule, fix = "the run is still going on in another process", "wait for its end, or stop it (Ctrl-C saves)"
            raise ConfigError(key="run_folder", value=str(self.path), rule=rule, fix=fix) from error

    def log_lengths(self) -> dict[str, int]:
        """Bytes of the files whose lines belong to no finished step by themselves: a resume cuts them there.

        A group's episodes are written when it arrives, which may be steps before or after what it is trained in.
        """
        return {name: (self.path / name).stat().st_size if (self.path / name).exists() else 0 for name in CUT_BY_LENGTH}

    def cut(self, step: int, log_lengths: Mapping[str, int]) -> None:
        """Bring the record back to a checkpoint: what will be done again is removed, so that it stands there once.

        Validations of finished steps stay, also those that ended after the checkpoint. `errors.jsonl` is history and is not cut.
        Nobody may have the files open.
        """
        for name, length in log_lengths.items():
            path = self.path / name
            if path.exists() and path.stat().st_size > length:
                os.truncate(path, length)
        keep_lines(self.metrics, lambda line: line["step"] <= step)
        validated = {line["step"] for line in read_json_lines(self.metrics) if VAL_SECONDS in line["metrics"]}
        keep_lines(self.trajectories / VAL_FILE, lambda line: line["step"] in validated)


def _recipe_folder(root: Path, recipe: str) -> Path:
    if not _RECIPE_NAME.fullmatch(recipe):
        rule = "a recipe's name is one folder name of letters, digits, '_', '-' and '.'"
        raise ConfigError(key="recipe", value=recipe, rule=rule, fix="use a name such as retool_tiny")
    return Path(root) / recipe
