"""The beginning of a resumed run: from a run folder to the point at which the loops go on.

Order matters: everything that can refuse comes before the first change, and the record is cut before anybody opens it.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from psrl.config.load import to_yaml
from psrl.config.resume_rules import changed_settings, check_changes
from psrl.config.tree import Config
from psrl.datasets.source import TaskSource, uids_given
from psrl.errors import CheckpointError, ConfigError
from psrl.runtime.recovery import newest_whole_checkpoint
from psrl.runtime.resume_point import Reissue, ResumePoint, check_point
from psrl.staleness.refit import refit
from psrl.telemetry.group_log import read_group_log
from psrl.telemetry.json_lines import JsonLinesFile
from psrl.telemetry.metric_log import read_metrics
from psrl.telemetry.names import VAL_SECONDS
from psrl.telemetry.run_folder import UNFINISHED_SUFFIX, RunFolder
from psrl.types import PolicyVersion

MAX_NAMED = 5
"""Groups that a message lists by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """A run that goes on."""

    folder: RunFolder
    checkpoint: Path
    point: ResumePoint
    is_validated: bool
    """Whether the weights of the checkpoint were validated; a validation that had not ended is nowhere."""
    notes: tuple[str, ...]
    """What the user should know."""


def resume_run(path: Path, config: Config, source: TaskSource) -> Resumed:
    """Open the run folder at `path` and bring `source`, settings and record to its newest whole checkpoint.

    Raises:
        ConfigError: There is no such run, it is still going on, or a setting has changed that may not change.
        CheckpointError: No checkpoint is whole, or the record does not fit it.
    """
    folder = RunFolder.open(path)
    changed = changed_settings(folder.config, config)
    check_changes(changed)
    folder.hold()
    found = newest_whole_checkpoint(folder.checkpoints)
    checkpoint, point = found.path, found.point
    if config.trainer.total_training_steps < point.step:
        rule = f"the run has done {point.step} steps already"
        fix = f"set trainer.total_training_steps={point.step} to only export the model, or more to go on"
        raise ConfigError(key="trainer.total_training_steps", value=config.trainer.total_training_steps, rule=rule, fix=fix)
    source.load_state_dict(point.source_state)
    for one in point.reissue:
        source.task_of(one.uid)
    notes = _check_record(folder, point)
    fitted = fit_to_settings(point, config)
    notes += found.set_aside()
    if len(fitted.arrived) < len(point.arrived):
        notes.append(f"{len(point.arrived) - len(fitted.arrived)} arrived groups do not fit the changed settings and are issued again")
    notes += [f"{key} is {new} now, was {old}" for key, (old, new) in changed.items()]
    folder.cut(point.step, point.log_lengths)
    _note_resume(folder, checkpoint, fitted, changed)
    _replace_text(folder.config, to_yaml(config))
    for leftover in folder.checkpoints.glob(f"*{UNFINISHED_SUFFIX}"):
        # The processes of a killed run may still be writing into it; they are gone before the next checkpoint.
        shutil.rmtree(leftover, ignore_errors=True)
    metrics = read_metrics(folder.metrics)
    is_validated = point.step in metrics and VAL_SECONDS in metrics[point.step]
    return Resumed(folder=folder, checkpoint=checkpoint, point=fitted, is_validated=is_validated, notes=tuple(notes))


def fit_to_settings(point: ResumePoint, config: Config) -> ResumePoint:
    """The point under a staleness or a last step that may have changed: arrived groups that it does not admit are issued again."""
    assert point.ledger is not None, "a run that has not begun has nothing to go on with"
    ledger, without_buffer = refit(
        point.ledger,
        staleness=config.psrl.staleness,
        groups_per_buffer=config.data.train_batch_size,
        last_version=PolicyVersion(point.version + config.trainer.total_training_steps - point.step),
    )
    again = [Reissue(uid=result.group, attempt=result.attempt) for result in point.arrived if result.group in without_buffer]
    arrived = tuple(result for result in point.arrived if result.group not in without_buffer)
    fitted = replace(point, ledger=ledger, arrived=arrived, reissue=(*again, *point.reissue))
    check_point(fitted)
    return fitted


def check_frontier(point: ResumePoint, fated: set[str]) -> None:
    """Every task that the source had given must have its fate, have arrived or be issued again, and only one of them.

    Raises:
        CheckpointError: The record tells another story than the checkpoint.
    """
    given = set(uids_given(point.source_state))
    open_groups = {result.group for result in point.arrived} | {one.uid for one in point.reissue}
    for what, uids in (
        ("were given and are neither in groups.jsonl nor in the checkpoint", given - fated - open_groups),
        ("stand in groups.jsonl and would be played again", fated & open_groups),
        ("were never given", (fated | open_groups) - given),
    ):
        if uids:
            names = ", ".join(sorted(uids)[:MAX_NAMED]) + (", ..." if len(uids) > MAX_NAMED else "")
            raise CheckpointError(f"record and checkpoint of step {point.step} differ: {len(uids)} groups {what}: {names}")


def _check_record(folder: RunFolder, point: ResumePoint) -> list[str]:
    """Notes; raises CheckpointError."""
    if folder.groups.name not in point.log_lengths:
        raise CheckpointError(f"the checkpoint of step {point.step} does not say how long {folder.groups.name} was")
    length, found = point.log_lengths[folder.groups.name], folder.log_lengths()[folder.groups.name]
    if found < length:
        return [f"{folder.groups.name} has {found} bytes, at the checkpoint it had {length}: it does not say what was trained on"]
    check_frontier(point, {fate.uid for fate in read_group_log(folder.groups, size_bytes=length)})
    return []


def _note_resume(folder: RunFolder, checkpoint: Path, point: ResumePoint, changed: dict[str, tuple[Any, Any]]) -> None:
    lines = JsonLinesFile(folder.resumes)
    lines.append(
        {
            "time": time.time(),
            "checkpoint": checkpoint.name,
            "step": point.step,
            "num_arrived": len(point.arrived),
            "num_issued_again": len(point.reissue),
            "changed": {key: {"from": old, "to": new} for key, (old, new) in changed.items()},
        }
    )
    lines.close()


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_suffix(".new")
    temporary.write_text(text)
    temporary.replace(path)
