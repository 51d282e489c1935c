"""Ray shell of one agent worker: many episodes at once in one process, a group at a time from the controller."""

from __future__ import annotations

import ray

from psrl.config.sandbox import engine_url_of
from psrl.processes.garbage import leave_out_what_is_there
from psrl.runtime.actors.pinged import Pinged
from psrl.runtime.group_play import EndHow
from psrl.runtime.groups import AgentWorker, AgentWorkerSettings, Endpoints, GroupRequest, GroupResult, WorkerFlows
from psrl.sandbox.reaper_process import start_reaper
from psrl.types import GroupUid

MAX_CALLS = 100_000
"""At once. Ray's default of 1000 would let pings wait behind groups, and a worker with many be taken as dead."""


@ray.remote(num_cpus=1, max_restarts=0, max_concurrency=MAX_CALLS)
class AgentWorkerActor(Pinged):
    """Episodes, tools and graders; writes trajectories into the data plane."""

    def __init__(self, settings: AgentWorkerSettings) -> None:
        self._worker = AgentWorker(settings)
        self._reaper = start_reaper(engine_url=engine_url_of(settings.sandbox))

    async def start(self) -> None:
        """Load the tokenizer, warm the sandboxes, check tools and graders with known answers."""
        await self._worker.start()

    async def connect(self, endpoints: Endpoints) -> None:
        """Attach to engines, gateway and data plane, which were started meanwhile."""
        await self._worker.connect(endpoints)
        leave_out_what_is_there()  # episodes bring a full collection about every few seconds

    async def readdress(self, old: str, new: str) -> None:
        """An engine was started again at another URL."""
        await self._worker.readdress(old, new)

    async def take_flows(self) -> WorkerFlows:
        """What it sent and got since the last call."""
        return self._worker.take_flows()

    async def run_group(self, request: GroupRequest) -> GroupResult:
        """Play all episodes of one task; returns when each of them has an outcome."""
        return await self._worker.run_group(request)

    async def end_group(self, group: GroupUid, how: EndHow) -> bool:
        """Have a group in flight ended early; False where it is not played here."""
        return await self._worker.end_group(group, how)

    async def move_group(self, group: GroupUid, instance: int) -> int:
        """Have a group in flight go on at another instance; how many turns were moved."""
        return await self._worker.move_group(group, instance)

    async def stop(self) -> None:
        """End sandboxes and graders."""
        await self._worker.stop()
        self._reaper.kill()
