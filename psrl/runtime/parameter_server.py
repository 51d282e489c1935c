"""The run's parameter server as its users see it: an actor that may be replaced, and what it holds."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence

import ray

from psrl.errors import ActorDiedError, ProcessDiedError
from psrl.protocols import WeightManifest
from psrl.runtime.actors.node_weights import NUM_KEPT
from psrl.runtime.kept_actor import KeptActor
from psrl.runtime.supervision import answer_of, look_of
from psrl.types import PolicyVersion


class ParameterServer:
    """Weights by version, through the actors that hold them in turn. Tensors are never here."""

    def __init__(self, actor: KeptActor) -> None:
        self.actor = actor
        self._manifests: OrderedDict[PolicyVersion, WeightManifest] = OrderedDict()

    @property
    def latest(self) -> WeightManifest | None:
        """The newest version that was pushed; None before the first."""
        return next(reversed(self._manifests.values())) if self._manifests else None

    def holds(self, version: PolicyVersion) -> bool:
        """Whether a version can be pulled."""
        return version in self._manifests

    def manifest(self, version: PolicyVersion) -> WeightManifest:
        """Of a version that it holds."""
        return self._manifests[version]

    async def push(self, train_workers: Sequence[ray.actor.ActorHandle], version: PolicyVersion, *, deadline_s: float) -> WeightManifest:
        """Have the train workers publish their weights; again, if the server dies meanwhile.

        Waits for: the server to be up, then the gather on all ranks. Unblocked by: its successor, the ranks, or the deadline.

        Raises:
            DeadlineError: It did not end in time.
            PsrlError: What a train worker raised.
        """
        until = time.monotonic() + deadline_s
        what = f"push of weights {version}"
        while True:
            handle = await self.up(what, until)
            pushes = [worker.push.remote(handle, version) for worker in train_workers]
            try:
                manifest = (await answer_of(what, asyncio.gather(*pushes), until - time.monotonic()))[0]
                break
            except ActorDiedError:
                raise  # a train worker
            except ProcessDiedError:
                if await self.actor.answers(handle):
                    raise
        self._manifests[version] = manifest
        while len(self._manifests) > NUM_KEPT:
            self._manifests.popitem(last=False)
        return manifest

    async def up(self, what: str, until: float) -> ray.actor.ActorHandle:
        """The actor, once it is up; `until` is in `time.monotonic`'s seconds. DeadlineError: it was not, for `what`."""
        return await look_of(f"{what}: the parameter server", self.actor.until_up(), until - time.monotonic())
