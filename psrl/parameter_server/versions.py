"""The versions of the weights that can be pulled. Each has one writer, and once it is complete many readers.

Invariant: what `latest` and `get` return was pushed to its end. A push that fails or is given up leaves no trace. Holds opaque
references, never tensors. The last `keep` versions stay, and older ones for as long as somebody reads them.

A writer or reader holds a lease: one that dies without a word blocks nobody for longer than `lease_s`. Times are given, in seconds of
any clock that does not go back. Not thread-safe: one owner serialises calls (the Ray actor around it runs one at a time).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, NewType, TypeVar

from psrl.errors import WeightSyncError
from psrl.protocols import WeightManifest
from psrl.types import PolicyVersion

Reference = TypeVar("Reference")
Lease = NewType("Lease", int)
"""Names one push or pull."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredVersion(Generic[Reference]):
    """One complete version."""

    manifest: WeightManifest
    reference: Reference
    """What the transport needs beside the manifest; opaque here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Push:
    """A version that is being written."""

    lease: Lease
    version: PolicyVersion
    ends_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Pull:
    """A version that is being read."""

    version: PolicyVersion
    ends_at: float


class VersionStore(Generic[Reference]):
    """Versions by number.

    Example:
        `lease = begin_push(3, now_s=0)`, then `commit_push(lease, manifest, reference, now_s=1)` makes version 3 the latest;
        `abort_push(lease)` instead leaves it unknown.
    """

    def __init__(self, *, keep: int = 2, lease_s: float = 120.0) -> None:
        """`keep`: complete versions held; at least 1."""
        assert keep >= 1, f"keep={keep}"
        assert lease_s > 0, f"lease_s={lease_s}"
        self._keep = keep
        self._lease_s = lease_s
        self._versions: OrderedDict[PolicyVersion, StoredVersion[Reference]] = OrderedDict()
        self._pulls: dict[Lease, Pull] = {}
        self._push: Push | None = None
        self._num_leases = 0

    def begin_push(self, version: PolicyVersion, *, now_s: float) -> Lease:
        """Become the writer.

        Raises:
            WeightSyncError: Another push is under way and its lease is not over, or the version is not newer than the latest.
        """
        if self._push is not None and now_s < self._push.ends_at:
            raise WeightSyncError(f"version {self._push.version} is being pushed; version {version} must wait")
        if self._versions and version <= (newest := next(reversed(self._versions))):
            raise WeightSyncError(f"version {version} is not newer than {newest}")
        self._push = Push(lease=self._next_lease(), version=version, ends_at=now_s + self._lease_s)
        return self._push.lease

    def push_ends_at(self) -> float | None:
        """When the push under way is given up at the latest; None: there is none."""
        return None if self._push is None else self._push.ends_at

    def commit_push(self, lease: Lease, manifest: WeightManifest, reference: Reference, *, now_s: float) -> tuple[PolicyVersion, ...]:
        """Make the version visible; returns all that are held now, so that the writer can free the others.

        Raises:
            WeightSyncError: The push was aborted, its lease was taken over, or it began for another version.
        """
        if self._push is None or self._push.lease != lease or self._push.version != manifest.version:
            raise WeightSyncError(f"version {manifest.version} cannot be committed: its push is over; under way is {self._push}")
        self._push = None
        self._versions[manifest.version] = StoredVersion(manifest=manifest, reference=reference)
        self._drop(now_s)
        return self.versions

    def abort_push(self, lease: Lease) -> None:
        """Give the push up; nothing happens when it is not under way (any more)."""
        if self._push is not None and self._push.lease == lease:
            self._push = None

    def begin_pull(self, version: PolicyVersion | None = None, *, now_s: float) -> tuple[Lease, StoredVersion[Reference]]:
        """Become a reader of a version, or of the latest; it stays until `end_pull` or the end of the lease.

        Raises:
            WeightSyncError: The version is not held.
        """
        stored = self.latest() if version is None else self.get(version)
        lease = self._next_lease()
        self._pulls[lease] = Pull(version=stored.manifest.version, ends_at=now_s + self._lease_s)
        return lease, stored

    def end_pull(self, lease: Lease, *, now_s: float) -> None:
        """Stop reading. Nothing happens when the lease is over."""
        self._pulls.pop(lease, None)
        self._drop(now_s)

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

    def _drop(self, now_s: float) -> None:
        """Forget what is older than the last `keep` and that nobody reads."""
        self._pulls = {lease: pull for lease, pull in self._pulls.items() if now_s < pull.ends_at}
        read = {pull.version for pull in self._pulls.values()}
        for version in self.versions[: -self._keep]:
            if version not in read:
                del self._versions[version]

    def _next_lease(self) -> Lease:
        self._num_leases += 1
        return Lease(self._num_leases)
