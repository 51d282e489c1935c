"""Checkpoints of a run: weights, optimizer, schedule, RNG, data order and version under one manifest, complete or absent.

A checkpoint is written into a temporary folder and renamed, so a crash leaves the previous one. What was in flight when it was
made is not in it: the data order points before those tasks, and they are issued again.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray

from psrl.errors import CheckpointError
from psrl.runtime.groups import GroupResult
from psrl.runtime.supervision import answer_of
from psrl.telemetry.run_folder import UNFINISHED_SUFFIX
from psrl.types import GroupUid, PolicyVersion

MANIFEST_FILE = "manifest.json"
TRAIN_FOLDER = "train"
PREFIX = "step-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reissue:
    """A group that was in flight: it is issued again before any new task."""

    uid: GroupUid
    attempt: int
    """As it was issued: a resume is no attempt of its own, so that the same episodes come out where they can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePoint:
    """Where a run goes on. Taken between two awaits of the driver, so that all of it is of one moment."""

    step: int
    """Training steps done."""
    version: PolicyVersion
    """Policy version of the weights."""
    source_state: dict[str, Any]
    """The data order, pointing at the first task that was never admitted."""
    ledger: dict[str, Any] | None = None
    """`StalenessLedger.snapshot()` after `advance`: which buffer holds which arrived group, and who is in flight. None: a new ledger."""
    reissue: tuple[Reissue, ...] = ()
    """Groups in flight, in the order in which they were admitted."""
    arrived: tuple[GroupResult, ...] = ()
    """Groups that wait for their update, without records; their rows lie beside the manifest."""
    log_lengths: dict[str, int] = field(default_factory=dict)
    """`RunFolder.log_lengths()`: what the record held. A resume cuts the files to it, so that nothing stands there twice."""


async def save_checkpoint(
    folder: Path, point: ResumePoint, *, train_workers: Sequence[ray.actor.ActorHandle], num_kept: int, deadline_s: float
) -> Path:
    """Write `folder/step-<n>` and remove all but the newest `num_kept`.

    Raises:
        CheckpointError: The disk is full or cannot be written; the previous checkpoint is untouched.
    """
    final = folder / f"{PREFIX}{point.step:06d}"
    unfinished = folder / (final.name + UNFINISHED_SUFFIX)
    try:
        for leftover in folder.glob(f"*{UNFINISHED_SUFFIX}"):
            shutil.rmtree(leftover)
        unfinished.mkdir(parents=True)
        saves = [worker.save.remote(unfinished / TRAIN_FOLDER) for worker in train_workers]
        await answer_of(f"checkpoint of step {point.step}", asyncio.gather(*saves), deadline_s)
        (unfinished / MANIFEST_FILE).write_text(json.dumps(asdict(point), indent=1))
        if final.exists():
            shutil.rmtree(final)
        unfinished.rename(final)
        for old in checkpoints_in(folder)[:-num_kept]:
            shutil.rmtree(old)
    except OSError as error:
        raise CheckpointError(f"checkpoint {final} cannot be written: {error}") from error
    return final


def checkpoints_in(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob(f"{PREFIX}*") if (path / MANIFEST_FILE).exists() and path.suffix != UNFINISHED_SUFFIX)


def read_resume_point(checkpoint: Path) -> ResumePoint:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: It is missing or does not have its fields.
    """
    try:
        fields = json.loads((checkpoint / MANIFEST_FILE).read_text())
        return ResumePoint(step=fields["step"], version=PolicyVersion(fields["version"]), source_state=fields["source_state"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {checkpoint} cannot be read: {type(error).__name__}: {error}") from error


async def restore_train_workers(checkpoint: Path, *, train_workers: Sequence[ray.actor.ActorHandle], deadline_s: float) -> None:
    """Load weights, optimizer, schedule and RNG into all ranks."""
    loads = [worker.restore.remote(checkpoint / TRAIN_FOLDER) for worker in train_workers]
    await answer_of(f"loading of {checkpoint.name}", asyncio.gather(*loads), deadline_s)
