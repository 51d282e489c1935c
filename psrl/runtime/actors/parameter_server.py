"""Ray shell of the version store: manifests by version, weights as references into Ray's object store."""

from __future__ import annotations

import asyncio

import ray

from psrl.parameter_server.versions import VersionStore
from psrl.protocols import WeightManifest
from psrl.types import PolicyVersion


@ray.remote(num_cpus=1, max_restarts=0)
class ParameterServerActor:
    """Holds the last weight versions; never touches a tensor."""

    def __init__(self, *, num_kept: int) -> None:
        self._versions: VersionStore[list[ray.ObjectRef]] = VersionStore(keep=num_kept)

    async def begin_push(self, version: PolicyVersion) -> None:
        """Become the writer of `version`; nothing is visible until `commit_push`."""
        self._versions.begin_push(version)

    async def commit_push(self, manifest: WeightManifest, reference: list[ray.ObjectRef]) -> None:
        """Make a complete version visible. The reference comes in a list so that Ray passes it on and does not fetch it."""
        self._versions.commit_push(manifest, reference)

    async def begin_pull(self, version: PolicyVersion) -> tuple[WeightManifest, list[ray.ObjectRef]]:
        """Become a reader: manifest and reference of a version."""
        stored = self._versions.begin_pull(version)
        return stored.manifest, stored.reference

    async def end_pull(self, version: PolicyVersion) -> None:
        """Stop reading; the next push may begin."""
        self._versions.end_pull(version)

    async def stay(self) -> None:
        """Never returns: whoever waits for it learns of this process's death."""
        await asyncio.Event().wait()
