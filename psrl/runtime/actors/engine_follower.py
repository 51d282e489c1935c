"""Ray shell of a further node of an engine replica that spans several: the process with its workers, and its node's weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import ray

from psrl.config.model import ModelConfig
from psrl.config.rollout import RolloutConfig
from psrl.errors import EngineError
from psrl.processes.child import ChildProcess
from psrl.protocols import WeightManifest
from psrl.runtime.actors.node_weights import NodeWeights
from psrl.runtime.actors.pinged import Pinged
from psrl.runtime.engines import NodeOfInstance, engine_command
from psrl.telemetry.flow import Flow


@ray.remote(num_cpus=1, max_restarts=0)
class EngineFollowerActor(Pinged):
    """One follower. It ends with the replica that made it, and its process with it; neither is started again by itself."""

    def __init__(self, name: str, *, model: ModelConfig, rollout: RolloutConfig, log_path: Path) -> None:
        """Make it; nothing is started. `name` is what errors call it."""
        self._name = name
        self._model, self._rollout = model, rollout
        self._log_path = log_path
        self._process: ChildProcess | None = None
        self._node_weights = NodeWeights()

    async def start(self, node: NodeOfInstance) -> None:
        """Start the process; returns once all nodes of the instance have met.

        Raises:
            ProcessDiedError: It ended, or they did not meet in time; with its last words.
        """
        argv = engine_command(self._model, self._rollout, node=node)
        self._process = ChildProcess(self._name, argv, log_path=self._log_path, host=node.address)
        await self._process.start(self._rollout.startup_timeout_s)

    async def bring(self, manifest: WeightManifest, writer: str) -> tuple[WeightManifest, Flow]:
        """A version to where the workers of this node can map it; the caller holds the lease. See `NodeWeights.local`."""
        return await self._node_weights.local(manifest, writer)

    async def watch(self) -> None:
        """Never returns; raises when the process has ended or answers nothing.

        Raises:
            EngineError: With what happened and its last words.
        """
        assert self._process is not None, "start() comes first"
        raise EngineError(await self._process.lost())

    async def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)
