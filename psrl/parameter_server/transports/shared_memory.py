"""Weight versions in shared memory that has no name: written once on a node, mapped by every replica there.

Invariant: what a manifest points to is complete and can't change: the file is sealed before its manifest exists. It lives as long as
its owner holds it or a replica has it mapped, and no longer, however these processes end: nothing of it lies in any folder.
"""

from __future__ import annotations

import dataclasses
import fcntl
import mmap
import os
from collections.abc import Iterable

import numpy as np

from psrl.errors import WeightSyncError
from psrl.parameter_server.checksum import checksum
from psrl.protocols import WeightManifest

TRANSPORT = "shared_memory"
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

Pieces = Iterable[tuple[int, np.ndarray]]
"""(offset, bytes [size] uint8) of the flat buffer; what lies between them is zero."""


class SharedVersion:
    """One version that this process offers to others on its node."""

    def __init__(self, manifest: WeightManifest, fd: int) -> None:
        """Made by `publish`."""
        self.manifest = manifest
        self._fd = fd

    def close(self) -> None:
        """Offer it no longer; may be called twice. Replicas that have it mapped keep it until they let go."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def publish(manifest: WeightManifest, pieces: Pieces) -> SharedVersion:
    """Write a version into shared memory.

    Args:
        manifest: From `layout.lay_out`. Where it already has a checksum, the bytes must have it.
        pieces: The whole version, such as `layout.pieces_of(tensors, manifest)`.

    Returns:
        The version, whose manifest has checksum and location.

    Raises:
        WeightSyncError: Memory is short, or the bytes have another checksum.
    """
    fd = os.memfd_create(f"psrl-weights-{manifest.version}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    shared = SharedVersion(dataclasses.replace(manifest, location=_location_of(fd)), fd)
    is_complete = False
    try:
        os.truncate(fd, manifest.total_bytes)
        for offset, piece in pieces:
            _write(fd, piece, offset)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
        found = checksum(open_version(shared.manifest))
        if manifest.checksum not in ("", found):
            raise WeightSyncError(f"version {manifest.version} arrived with checksum {found}, its manifest says {manifest.checksum}")
        shared.manifest = dataclasses.replace(shared.manifest, checksum=found)
        is_complete = True
    except OSError as error:
        raise WeightSyncError(f"cannot hold version {manifest.version} ({manifest.total_bytes} bytes) in memory: {error}") from error
    finally:
        if not is_complete:
            shared.close()
    return shared


def open_version(manifest: WeightManifest) -> np.ndarray:
    """Map a published version; the mapping ends with the last view of it, and writes to it would stay private.

    Raises:
        WeightSyncError: It is no longer there, or another file is in its place.
    """
    path, inode = _place_of(manifest)
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != inode:
                raise WeightSyncError(f"cannot map version {manifest.version} at {path}: it is no longer there")
            if found.st_size != manifest.total_bytes:
                raise WeightSyncError(
                    f"{path} has {found.st_size} bytes, the manifest of version {manifest.version} says {manifest.total_bytes}"
                )
            mapping = mmap.mmap(file.fileno(), found.st_size, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise WeightSyncError(f"cannot map version {manifest.version} at {path}: {error}") from error
    return np.frombuffer(mapping, dtype=np.uint8)


def _location_of(fd: int) -> dict[str, str]:
    """A path at which every process of this user on the node finds the file while this process holds it."""
    return {"transport": TRANSPORT, "path": f"/proc/{os.getpid()}/fd/{fd}", "inode": str(os.fstat(fd).st_ino)}


def _place_of(manifest: WeightManifest) -> tuple[str, int]:
    location = manifest.location
    if location.get("transport") != TRANSPORT or not location.keys() >= {"path", "inode"}:
        raise WeightSyncError(f"manifest of version {manifest.version} has no {TRANSPORT} location: {location}")
    return location["path"], int(location["inode"])


def _write(fd: int, piece: np.ndarray, offset: int) -> None:
    """A write fills fresh pages without zeroing them first, which a mapping would do."""
    rest = memoryview(piece)
    while rest:
        count = os.pwrite(fd, rest, offset)
        rest, offset = rest[count:], offset + count
