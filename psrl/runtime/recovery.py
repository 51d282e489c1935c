"""Checkpoints of a run: weights, optimizer, schedule, RNG, data order, ledger and arrived groups under one manifest, complete or absent.

    step-000012/
    ├── manifest.json       where the run goes on (`ResumePoint`), and size and checksum of every other file
    ├── arrived.json        groups that wait for their update
    ├── rows-*.safetensors  their rows in the data plane, if there are any
    └── train/              weights, optimizer, schedule, RNG of every rank

A checkpoint is written into a folder of another name, flushed to the disk and renamed, so a crash leaves the previous one. It is
whole if its manifest and all files are as written; one that is not is passed over by a resume, for the one before it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from safetensors import SafetensorError

from psrl.data_plane import DataPlane
from psrl.errors import CheckpointError, PsrlError
from psrl.runtime.resume_point import Reissue, ResumePoint, check_point
from psrl.runtime.saved_rows import read_rows, save_rows
from psrl.runtime.supervision import answer_of
from psrl.telemetry.run_folder import UNFINISHED_SUFFIX

__all__ = [
    "OtherFormatError",
    "Reissue",
    "ResumePoint",
    "WholeCheckpoint",
    "checkpoints_in",
    "newest_whole_checkpoint",
    "read_checkpoint",
    "restore_rows",
    "restore_train_workers",
    "save_checkpoint",
]

FORMAT = 2
"""Of the manifest. 1 knew neither ledger nor groups in flight; it is refused by name."""
MANIFEST_FILE = "manifest.json"
ARRIVED_FILE = "arrived.json"
TRAIN_FOLDER = "train"
DAMAGED_SUFFIX = ".damaged"
CHECKSUM_THREADS = 4
_NAME = re.compile(r"step-(\d+)")


class OtherFormatError(CheckpointError):
    """A checkpoint of another psrl: not damaged, and not to be passed over for an older one without a word."""


async def save_checkpoint(
    folder: Path,
    point: ResumePoint,
    *,
    train_workers: Sequence[ray.actor.ActorHandle],
    data_plane: DataPlane,
    num_kept: int,
    deadline_s: float,
) -> Path:
    """Write `folder/step-<n>` and remove all but the newest `num_kept`.

    `folder` is the `checkpoints` of a run folder. Groups that arrive meanwhile are not in it; the rows of those that are in it must
    stay in the data plane until this returns.

    Raises:
        CheckpointError: The disk is full or cannot be written; the previous checkpoint is untouched, and nothing of this one is left.
        PsrlError: A train worker or the data plane failed.
    """
    check_point(point)
    final = folder / f"step-{point.step:06d}"
    unfinished = folder / (final.name + UNFINISHED_SUFFIX)
    what = f"checkpoint of step {point.step}"
    try:
        await asyncio.to_thread(_begin, folder, unfinished)
        saves = [worker.save.remote(unfinished / TRAIN_FOLDER) for worker in train_workers]
        rows = asyncio.to_thread(save_rows, unfinished, [result.meta for result in point.arrived], data_plane)
        await answer_of(what, asyncio.gather(rows, *saves), deadline_s)
        await answer_of(what, asyncio.to_thread(_complete, unfinished, final, point), deadline_s)
        await asyncio.to_thread(_remove_old, folder, num_kept)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CheckpointError(f"checkpoint {final} cannot be written: {error}") from error
    except PsrlError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return final


def checkpoints_in(folder: Path) -> list[Path]:
    """Checkpoints, oldest first; whether they are whole is not looked at."""
    found = [(int(match[1]), path) for path in folder.glob("*") if (match := _NAME.fullmatch(path.name)) and path.is_dir()]
    return [path for _, path in sorted(found)]


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeCheckpoint:
    """A checkpoint that is as it was written."""

    path: Path
    point: ResumePoint
    passed_over: tuple[tuple[Path, str], ...]
    """Newer ones that are not, with what is wrong with them."""

    def set_aside(self) -> list[str]:
        """Rename what was passed over, so that it is neither counted nor met again; notes for the user."""
        notes = []
        for damaged, problem in self.passed_over:
            aside = damaged.with_name(damaged.name + DAMAGED_SUFFIX)
            shutil.rmtree(aside, ignore_errors=True)
            damaged.rename(aside)
            notes.append(f"going on from {self.path.name}: {problem} (now {aside.name})")
        return notes


def newest_whole_checkpoint(folder: Path) -> WholeCheckpoint:
    """The newest checkpoint that can be gone on from; nothing is changed.

    Raises:
        OtherFormatError: The newest is of another psrl.
        CheckpointError: There is none; the message says what is wrong with each.
    """
    problems: list[tuple[Path, str]] = []
    for checkpoint in reversed(checkpoints_in(folder)):
        try:
            return WholeCheckpoint(path=checkpoint, point=read_checkpoint(checkpoint), passed_over=tuple(problems))
        except OtherFormatError:
            raise
        except CheckpointError as error:
            problems.append((checkpoint, str(error)))
    if not problems:
        raise CheckpointError(f"{folder} holds no checkpoint")
    raise CheckpointError(f"{folder} holds no checkpoint to go on from: " + "; ".join(problem for _, problem in problems))


def read_checkpoint(checkpoint: Path) -> ResumePoint:
    """Where the run goes on, once every file of the checkpoint is known to be as it was written.

    Raises:
        OtherFormatError: It is of another psrl, and may be as good as new.
        CheckpointError: A file is missing, cut or changed, or what they say does not fit together.
    """
    try:
        manifest = json.loads((checkpoint / MANIFEST_FILE).read_text())
        written_as = manifest.get("format", 1)
        if written_as != FORMAT:
            raise OtherFormatError(f"{checkpoint} was written by another psrl (format {written_as}; this one reads {FORMAT})")
        _verify(checkpoint, manifest["files"])
        point = ResumePoint.of(manifest["point"], json.loads((checkpoint / ARRIVED_FILE).read_text()))
        check_point(point)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{checkpoint.name} is damaged: {type(error).__name__}: {error}") from error
    except OtherFormatError:
        raise
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint.name} is damaged: {error}") from error
    return point


async def restore_train_workers(checkpoint: Path, *, train_workers: Sequence[ray.actor.ActorHandle], deadline_s: float) -> None:
    """Load weights, optimizer, schedule and RNG into all ranks."""
    loads = [worker.restore.remote(checkpoint / TRAIN_FOLDER) for worker in train_workers]
    await answer_of(f"loading of {checkpoint.name}", asyncio.gather(*loads), deadline_s)


async def restore_rows(checkpoint: Path, point: ResumePoint, *, data_plane: DataPlane) -> None:
    """Put the rows of arrived groups back into the data plane.

    Raises:
        CheckpointError: They cannot be read.
        DataPlaneError: They cannot be stored.
    """

    def put() -> None:
        for rows in read_rows(checkpoint, [result.meta for result in point.arrived]):
            data_plane.put(rows)

    await asyncio.to_thread(put)


def _begin(folder: Path, unfinished: Path) -> None:
    for leftover in folder.glob(f"*{UNFINISHED_SUFFIX}"):
        shutil.rmtree(leftover)
    unfinished.mkdir(parents=True)


def _complete(unfinished: Path, final: Path, point: ResumePoint) -> None:
    """Manifest, flush, rename: after this the checkpoint is there, also after a loss of power."""
    (unfinished / ARRIVED_FILE).write_text(json.dumps(point.arrived_as_list()))
    manifest = {"format": FORMAT, "point": point.as_dict(), "files": _files_of(unfinished)}
    (unfinished / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1))
    run_folder = final.parent.parent
    # The record must be at least as long as the manifest says.
    _flush([run_folder / name for name in point.log_lengths])
    _flush(sorted(unfinished.rglob("*")))
    _flush([unfinished])
    replaced = final.with_name(f"{final.name}.replaced{UNFINISHED_SUFFIX}")
    if final.exists():
        final.rename(replaced)
    unfinished.rename(final)
    _flush([final.parent])
    shutil.rmtree(replaced, ignore_errors=True)


def _files_of(folder: Path) -> dict[str, dict[str, Any]]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(CHECKSUM_THREADS) as threads:
        checksums = list(threads.map(_checksum, paths))
    return {
        path.relative_to(folder).as_posix(): {"size_bytes": path.stat().st_size, "sha256": checksum}
        for path, checksum in zip(paths, checksums, strict=True)
    }


def _verify(checkpoint: Path, files: dict[str, dict[str, Any]]) -> None:
    paths = {name: checkpoint / name for name in files}
    for name, path in paths.items():
        if not path.is_file():
            raise CheckpointError(f"{name} is missing")
        if path.stat().st_size != files[name]["size_bytes"]:
            raise CheckpointError(f"{name} has {path.stat().st_size} bytes, written were {files[name]['size_bytes']}")
    with ThreadPoolExecutor(CHECKSUM_THREADS) as threads:
        for name, checksum in zip(paths, threads.map(_checksum, paths.values()), strict=True):
            if checksum != files[name]["sha256"]:
                raise CheckpointError(f"{name} is not what was written")


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(paths: Iterable[Path]) -> None:
    """Hand files and folders to the disk; those that are not there are passed over."""
    for path in paths:
        if not path.exists():
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_old(folder: Path, num_kept: int) -> None:
    for old in checkpoints_in(folder)[:-num_kept]:
        shutil.rmtree(old)
