"""The versions of the weights that can be pulled: one writer or many readers, never both.

Invariant: what `latest` and `get` return was pushed to its end. A push that fails or is given up leaves no trace. Holds opaque
references (an object-store reference, a manifest), never tensors; the last `keep` versions stay.

Not thread-safe: one owner serialises calls (the Ray actor around it runs one at a time).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from psrl.errors import WeightSyncError
from psrl.protocols import WeightManifest
from psrl.types import PolicyVersion

Reference = TypeVar("Reference")


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredVersion(Generic[Reference]):
    """One complete version."""

    manifest: WeightManifest
    reference: Reference
    """What the transport needs beside the manifest; opaque here."""


class VersionStore(Generic[Reference]):
    """Versions by number, oldest dropped first.

    Example:
        `begin_push(3)`, then `commit_push(manifest, reference)` makes version 3 the latest; `abort_push()` instead leaves it unknown.
    """

    def __init__(self, *, keep: int = 2) -> None:
        """`keep`: complete versions held; at least 1."""
        assert keep >= 1, f"keep={keep}"
        self._keep = keep
        self._versions: OrderedDict[PolicyVersion, StoredVersion[Reference]] = OrderedDict()
        self._readers: dict[PolicyVersion, int] = {}
        self._pushing: PolicyVersion | None = None

    def begin_push(self, version: PolicyVersion) -> None:
        """Become the writer.

        Raises:
            WeightSyncError: A push or pulls are under way, or the version is not newer than the latest.
        """
        if self._pushing is not None:
            raise WeightSyncError(f"version {self._pushing} is being pushed; version {version} must wait")
        if self._readers:
            raise WeightSyncError(f"versions {sorted(self._readers)} are being pulled; the push of {version} must wait")
        if self._versions and version <= (newest := next(reversed(self._versions))):
            raise WeightSyncError(f"version {version} is not newer than {newest}")
        self._pushing = version

    def commit_push(self, manifest: WeightManifest, reference: Reference) -> tuple[StoredVersion[Reference], ...]:
        """Make the version visible; returns those that fell out, so that the caller can free them.

        Raises:
            WeightSyncError: No push of this version was begun.
        """
        if self._pushing != manifest.version:
            raise WeightSyncError(f"commit of version {manifest.version}, but the push under way is {self._pushing}")
        self._pushing = None
        self._versions[manifest.version] = StoredVersion(manifest=manifest, reference=reference)
        num_dropped = max(0, len(self._versions) - self._keep)
        return tuple(self._versions.popitem(last=False)[1] for _ in range(num_dropped))

    def abort_push(self) -> None:
        """Give the push up; may be called when none is under way."""
        self._pushing = None

    def begin_pull(self, version: PolicyVersion | None = None) -> StoredVersion[Reference]:
        """Become a reader of a version, or of the latest.

        Raises:
            WeightSyncError: A push is under way, or the version is not held.
        """
        if self._pushing is not None:
            raise WeightSyncError(f"version {self._pushing} is being pushed; pulls must wait")
        stored = self.latest() if version is None else self.get(version)
        self._readers[stored.manifest.version] = self._readers.get(stored.manifest.version, 0) + 1
        return stored

    def end_pull(self, version: PolicyVersion) -> None:
        """Stop reading.

        Raises:
            WeightSyncError: Nobody reads this version.
        """
        if version not in self._readers:
            raise WeightSyncError(f"version {version} is not being pulled")
        self._readers[version] -= 1
        if self._readers[version] == 0:
            del self._readers[version]

    def latest(self) -> StoredVersion[Reference]:
        """The newest complete version.

        Raises:
            WeightSyncError: Nothing was pushed yet.
        """
        if not self._versions:
            raise WeightSyncError("no version of the weights was pushed yet")
        return next(reversed(self._versions.values()))

    def get(self, version: PolicyVersion) -> StoredVersion[Reference]:
        """A version by number.

        Raises:
            WeightSyncError: It is not held (not pushed, or already dropped).
        """
        if version not in self._versions:
            raise WeightSyncError(f"version {version} is not held; held: {list(self._versions)}")
        return self._versions[version]

    @property
    def versions(self) -> tuple[PolicyVersion, ...]:
        """Complete versions, oldest first."""
        return tuple(self._versions)
