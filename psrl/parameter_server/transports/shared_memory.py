"""Weight versions as files of shared memory: written once, mapped by every replica on the node.

Invariant: a file under its final name is complete. A push writes under a temporary name and renames, so one that fails half-way is
never seen. A mapping stays valid after `remove`.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import uuid
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from psrl.errors import WeightSyncError
from psrl.parameter_server.layout import checksum, lay_out, pack
from psrl.protocols import WeightManifest
from psrl.types import PolicyVersion

TRANSPORT = "shared_memory"
DEFAULT_FOLDER = Path("/dev/shm")


def write_version(folder: Path, named_tensors: Iterable[tuple[str, torch.Tensor]], version: PolicyVersion) -> WeightManifest:
    """Lay out, pack and publish one version; the manifest says where it lies.

    Raises:
        WeightSyncError: The file cannot be written, such as shared memory being full.
    """
    named = list(named_tensors)
    manifest = lay_out(named, version=version)
    buffer = np.zeros(manifest.total_bytes, dtype=np.uint8)
    pack(named, manifest, buffer)
    return write_buffer(folder, dataclasses.replace(manifest, checksum=checksum(buffer)), buffer)


def write_buffer(folder: Path, manifest: WeightManifest, buffer: memoryview | np.ndarray) -> WeightManifest:
    """Publish a packed buffer; returns the manifest with its location.

    Raises:
        WeightSyncError: The buffer has another size than the manifest, or the file cannot be written.
    """
    flat = np.frombuffer(buffer, dtype=np.uint8)
    if flat.nbytes != manifest.total_bytes:
        raise WeightSyncError(f"buffer has {flat.nbytes} bytes, the manifest of version {manifest.version} says {manifest.total_bytes}")
    unique = uuid.uuid4().hex[:12]
    final = folder / f"psrl-weights-{manifest.version}-{unique}"
    partial = folder / f".{final.name}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(partial, "xb") as file:
            file.write(flat.data)
        os.rename(partial, final)
    except OSError as error:
        if partial.exists():
            partial.unlink()
        raise WeightSyncError(f"cannot write version {manifest.version} ({flat.nbytes} bytes) to {final}: {error}") from error
    return dataclasses.replace(manifest, location={"transport": TRANSPORT, "path": str(final)})


def open_version(manifest: WeightManifest) -> np.ndarray:
    """Map a published version; the mapping ends with the last view of it, and writes to it would stay private.

    Raises:
        WeightSyncError: There is no such file, or it has another size.
    """
    path = path_of(manifest)
    try:
        with open(path, "rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise WeightSyncError(f"cannot map version {manifest.version} at {path}: {error}") from error
    if len(mapping) != manifest.total_bytes:
        raise WeightSyncError(f"{path} has {len(mapping)} bytes, the manifest of version {manifest.version} says {manifest.total_bytes}")
    return np.frombuffer(mapping, dtype=np.uint8)


def remove(manifest: WeightManifest) -> None:
    """Take the file away; may be called twice. Replicas that have it mapped keep it until they let go."""
    path_of(manifest).unlink(missing_ok=True)


def path_of(manifest: WeightManifest) -> Path:
    """Where the version's file lies.

    Raises:
        WeightSyncError: The manifest belongs to another transport.
    """
    if manifest.location.get("transport") != TRANSPORT or "path" not in manifest.location:
        raise WeightSyncError(f"manifest of version {manifest.version} has no {TRANSPORT} location: {manifest.location}")
    return Path(manifest.location["path"])
