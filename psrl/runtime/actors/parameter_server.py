"""Ray shell of the version store: manifests by version, and the writers that hold the weights. No tensor is ever here."""

from __future__ import annotations

import asyncio
import time

import ray

from psrl.parameter_server.versions import Lease, VersionStore
from psrl.protocols import WeightManifest
from psrl.runtime.actors.pinged import Pinged
from psrl.types import PolicyVersion


@ray.remote(num_cpus=1, max_restarts=0)
class ParameterServerActor(Pinged):
    """Holds the last weight versions."""

    def __init__(self, *, num_kept: int, lease_s: float = 120.0) -> None:
        """`lease_s`: so long a writer or reader that died can hold up the others."""
        self._versions: VersionStore[str] = VersionStore(keep=num_kept, lease_s=lease_s)
        self._push_ended = asyncio.Condition()

    async def begin_push(self, version: PolicyVersion) -> Lease:
        """Become the writer of `version`; nothing is visible until `commit_push`.

        Waits for: the end of another push. Unblocked by: its commit or abort, or the end of its lease.
        """
        async with self._push_ended:
            while (ends_at := self._versions.push_ends_at()) is not None and (left_s := ends_at - time.monotonic()) > 0:
                try:
                    await asyncio.wait_for(self._push_ended.wait(), left_s)
                except TimeoutError:
                    break
            return self._versions.begin_push(version, now_s=time.monotonic())

    async def commit_push(self, lease: Lease, manifest: WeightManifest, writer: str) -> tuple[PolicyVersion, ...]:
        """Make a complete version visible; the versions that are held from now on. `writer` is the name of the actor that has its bytes."""
        held = self._versions.commit_push(lease, manifest, writer, now_s=time.monotonic())
        await self._notify()
        return held

    async def abort_push(self, lease: Lease) -> None:
        """Give a push up; the next one may begin."""
        self._versions.abort_push(lease)
        await self._notify()

    async def begin_pull(self, version: PolicyVersion | None = None) -> tuple[Lease, WeightManifest, str]:
        """Become a reader of a version, None: of the latest. It is held until `end_pull`, or as long as the lease."""
        lease, stored = self._versions.begin_pull(version, now_s=time.monotonic())
        return lease, stored.manifest, stored.reference

    async def end_pull(self, lease: Lease) -> None:
        """Stop reading."""
        self._versions.end_pull(lease, now_s=time.monotonic())

    async def latest(self) -> WeightManifest | None:
        """Of the newest complete version; None before the first."""
        return self._versions.latest().manifest if self._versions.versions else None

    async def held(self) -> tuple[PolicyVersion, ...]:
        """Versions that can be pulled, oldest first."""
        return self._versions.versions

    async def _notify(self) -> None:
        async with self._push_ended:
            self._push_ended.notify_all()
