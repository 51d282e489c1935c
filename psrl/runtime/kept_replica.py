"""An engine replica that is started again when it dies or falls silent, on its own address, and serves nothing before it has the weights.

Two processes can die: the server, which its actor starts again, and the actor, which takes the server with it. A replica that spans nodes
has more of both kinds; whichever of them dies, all are made anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import ray

from psrl.errors import ActorDiedError, EngineError, ProcessDiedError, PsrlError, WeightSyncError
from psrl.protocols import WeightManifest, WeightReport
from psrl.runtime.actors.engine_replica import SyncResult
from psrl.runtime.addresses import OnMove
from psrl.runtime.kept_actor import Died, KeptActor, KeptLimits
from psrl.runtime.parameter_server import ParameterServer
from psrl.runtime.supervision import answer_of, first_done, look_of
from psrl.staleness import InstanceLoad
from psrl.telemetry.flow import Flow
from psrl.types import PolicyVersion

LOOK_S = 2.0
"""Between two looks at whether a replica that has turns samples tokens."""
LOAD_DEADLINE_S = 5.0


class KeptReplica(KeptActor):
    """One replica at one URL, which changes only where it has to go to another node.

    Invariant: while `is_up` it serves `version`; a server that was started again samples nothing before that.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[int], ray.actor.ActorHandle],
        *,
        moved: OnMove,
        parameter_server: ParameterServer,
        sync_s: float,
        stuck_after_s: float,
        num_nodes: int = 1,
        limits: KeptLimits,
        died: Died,
        note: Callable[[str], None],
    ) -> None:
        """`make(port)` makes its actor; `moved` tells everybody of another URL; `stuck_after_s`: a replica that has turns and samples
        nothing for so long is started again."""
        self._port = 0
        self.url = ""
        self._moved = moved
        self._parameter_server = parameter_server
        self._sync_s = sync_s
        self._stuck_after_s = stuck_after_s
        self._num_nodes = num_nodes
        self.version = PolicyVersion(0)
        """What it serves, or served when it died."""
        self.brought = Flow()
        """Weights that came over the network for it."""
        self.wanted: Callable[[], PolicyVersion] = lambda: self.version
        """What it must serve to be up again."""
        super().__init__(name, lambda: make(self._port), prepare=self._start_paused, limits=limits, died=died, note=note, has_watch=True)

    async def start(self) -> str:
        """Its first server; the URL."""
        self._listens_at(await self.handle.start.remote())
        return self.url

    async def sync(self, manifest: WeightManifest, mode: str) -> SyncResult:
        """Take a version while it serves.

        Raises:
            EngineError: It is down, went down, or cannot take it; in either case it is started again.
            WeightSyncError: It reports other weights than were pushed.
            DeadlineError: The parameter server was not there in time, or the replica did not end.
        """
        if not self.is_up:
            raise EngineError(f"{self.name} is down")
        handle = self.handle
        try:
            return await self._pull(handle, manifest, mode)
        except (ActorDiedError, EngineError) as error:
            self.suspect(handle, str(error))
            raise EngineError(f"{self.name}: {error}") from error

    async def load(self) -> InstanceLoad | None:
        """Its load now; None where it does not say."""
        try:
            load: InstanceLoad = await look_of(f"load of {self.name}", self.handle.load.remote(), LOAD_DEADLINE_S)
        except PsrlError:
            return None
        return load

    async def _end(self) -> str:
        return await first_done((super()._end(), self._stuck()))

    async def _stuck(self) -> str:
        since = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            load = await self.load()
            if load is not None and (load.num_running + load.num_waiting == 0 or load.tokens_per_s > 0):
                since = time.monotonic()
            elif time.monotonic() - since > self._stuck_after_s:
                has = (
                    "does not say what it does" if load is None else f"has {load.num_running + load.num_waiting} turns and sampled nothing"
                )
                return f"it {has} for {self._stuck_after_s:g} s"

    async def _start_again(self) -> None:
        if self._num_nodes == 1 and await self.answers(self.handle):
            await answer_of(f"start of {self.name}", self.handle.restart.remote(), self._limits.startup_s)
        else:
            await self._replace()
        await self._take_weights()
        await self._go_up()

    async def _start_paused(self, handle: ray.actor.ActorHandle) -> None:
        before = self.url
        self._listens_at(await handle.start.remote(paused=True))
        if self.url != before:
            await self._moved(before, self.url)

    def _listens_at(self, url: str) -> None:
        self.url, self._port = url, int(url.rpartition(":")[2])

    async def _take_weights(self) -> None:
        """What it served before, where that can still be had, so that a version that is held for validation stays; else the newest."""
        latest = self._parameter_server.latest
        if latest is None or self.wanted() == 0:
            await answer_of(f"resume of {self.name}", self.handle.resume.remote(), self._sync_s)
            self.version = PolicyVersion(0)
            return
        while True:
            version = self.wanted()
            holds = self._parameter_server.holds(version)
            await self._pull(self.handle, self._parameter_server.manifest(version) if holds else latest, "keep")
            if self.wanted() <= self.version:
                return

    async def _pull(self, handle: ray.actor.ActorHandle, manifest: WeightManifest, mode: str) -> SyncResult:
        """Again, while the parameter server is replaced."""
        until = time.monotonic() + self._sync_s
        what = f"pull of weights {manifest.version} by {self.name}"
        while True:
            server = await self._parameter_server.up(what, until)
            try:
                result: SyncResult = await answer_of(what, handle.sync.remote(server, manifest.version, mode), until - time.monotonic())
                break
            except ActorDiedError:
                raise
            except ProcessDiedError:
                if await self._parameter_server.actor.answers(server):
                    raise
        self.brought.join(result.brought)
        check_report(self.name, manifest, result.report)
        self.version = manifest.version
        return result


def check_report(who: str, manifest: WeightManifest, report: WeightReport) -> None:
    """Version, number of tensors and checksum must be those that were pushed.

    Raises:
        WeightSyncError: They are not.
    """
    expected = (manifest.version, len(manifest.tensors), len(manifest.tensors), manifest.checksum)
    found = (report.version, report.num_matched, report.num_expected, report.checksum)
    if expected != found:
        raise WeightSyncError(
            f"{who} has version {report.version}, {report.num_matched} of {report.num_expected} tensors, checksum {report.checksum}; "
            f"pushed was version {manifest.version}, {len(manifest.tensors)} tensors, checksum {manifest.checksum}"
        )
