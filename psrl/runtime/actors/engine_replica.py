"""Ray shell of one engine replica: starts its server, watches it, and brings weights from the object store to it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import ray

from psrl.config.model import ModelConfig
from psrl.config.rollout import RolloutConfig
from psrl.engine_client.client import HttpReplica
from psrl.errors import EngineError
from psrl.parameter_server.transports.shared_memory import DEFAULT_FOLDER, remove, write_buffer
from psrl.processes.child import ChildProcess
from psrl.protocols import WeightReport
from psrl.runtime.engines import engine_command
from psrl.types import PolicyVersion


@ray.remote(num_cpus=1, max_restarts=0)
class EngineReplicaActor:
    """One replica. Its server dies with this process, whatever ends it."""

    def __init__(self, *, index: int, model: ModelConfig, rollout: RolloutConfig, log_folder: Path) -> None:
        self._rollout = rollout
        self._process = ChildProcess(f"engine replica {index}", engine_command(model, rollout), log_path=log_folder / f"engine-{index}.log")
        self._replica: HttpReplica | None = None

    async def start(self) -> str:
        """Start the server; its URL once it answers."""
        await self._process.start(self._rollout.startup_timeout_s)
        self._replica = HttpReplica(self._process.url, request_timeout_s=self._rollout.request_timeout_s)
        return self._process.url

    async def sync(self, parameter_server: ray.actor.ActorHandle, version: PolicyVersion) -> WeightReport:
        """Pause, pull `version` and load it, resume; what the server says it has now."""
        assert self._replica is not None, "start() comes first"
        manifest, (reference,) = await parameter_server.begin_pull.remote(version)
        try:
            local = await asyncio.to_thread(write_buffer, DEFAULT_FOLDER, manifest, await reference)
        finally:
            await parameter_server.end_pull.remote(version)
        await self._replica.pause("keep")
        try:
            return await self._replica.update_weights(local)
        finally:
            await self._replica.resume()
            remove(local)

    async def watch(self) -> None:
        """Never returns; raises when the server has ended.

        Raises:
            EngineError: With the exit code and the server's last words.
        """
        code = await self._process.ended()
        raise EngineError(f"{self._process.name} ended with code {code}: {self._process.last_words()}")

    async def stop(self) -> None:
        """End the server."""
        if self._replica is not None:
            await self._replica.close()
        await asyncio.to_thread(self._process.stop)
