"""Ray shell of one engine replica: starts its server, watches it, and brings weights to it. Where the replica spans nodes, this is its
first one, at which it serves; of the others it has followers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import ray

from psrl.config.model import ModelConfig
from psrl.config.rollout import RolloutConfig
from psrl.engine_client.client import HttpReplica
from psrl.errors import EngineError, PsrlError
from psrl.processes.child import PORT_WAIT_S, ChildProcess
from psrl.protocols import WeightManifest, WeightReport
from psrl.runtime.actors.node_weights import NodeWeights
from psrl.runtime.actors.pinged import Pinged
from psrl.runtime.engines import NodeOfInstance, engine_command
from psrl.runtime.followers import Followers, with_followers
from psrl.runtime.placement import FollowerPlace
from psrl.runtime.supervision import END_OF_TASKS_S, end_tasks, first_done
from psrl.staleness import InstanceLoad
from psrl.telemetry.flow import Flow
from psrl.types import PolicyVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncResult:
    """What a sync came to."""

    report: WeightReport
    """What the server says that it serves now."""
    seconds: float
    """From the order to the report."""
    paused_s: float
    """Of them, those in which the replica stood still; with `wait`, also those in which its running requests ended."""
    brought: Flow = field(default_factory=Flow)
    """What came over the network for it."""


@ray.remote(num_cpus=1, max_restarts=0)
class EngineReplicaActor(Pinged):
    """One replica. Its server dies with this process, whatever ends it."""

    def __init__(
        self,
        *,
        index: int,
        model: ModelConfig,
        rollout: RolloutConfig,
        log_folder: Path,
        weight_sync_s: float,
        host: str = "127.0.0.1",
        port: int = 0,
        followers: Sequence[FollowerPlace] = (),
    ) -> None:
        """Make it; nothing is started.

        `weight_sync_s` bounds each call of a sync to the server; a pause with `wait` lasts as long as the longest running turn.
        `host` and `port`: where the server listens, 0 takes a free one; a replica that takes another's place takes its port.
        `followers`: the replica's further nodes. One that has any is started once, and made anew when it is lost.
        """
        self._name = f"engine replica {index}"
        self._rollout = rollout
        self._host = host
        self._weight_sync_s = weight_sync_s
        self._model = model
        self._log_path = log_folder / f"engine-{index}.log"
        self._port = port
        self._process: ChildProcess | None = None
        self._followers = Followers(self._name, followers, model=model, rollout=rollout, log_path=self._log_path)
        self._replica: HttpReplica | None = None
        self._node_weights = NodeWeights()
        self._syncing = asyncio.Lock()

    async def start(self, paused: bool = False) -> str:
        """Start the server; its URL once it answers. With `paused` requests wait until `sync` or `resume`.

        Raises:
            ProcessDiedError: It, or a follower, ended or was not ready in time.
            DeadlineError: A follower was not there in time.
            ConfigError: The engine is not installed here.
        """
        nodes = self._followers.nodes(self._host)
        self._process = self._new_process(nodes[0], is_paused=paused)
        starts = [
            asyncio.ensure_future(start) for start in (self._process.start(self._rollout.startup_timeout_s), *self._followers.starts(nodes))
        ]
        try:
            await asyncio.gather(*starts)
        except PsrlError:
            await asyncio.to_thread(self._process.stop, 0.0)  # it may still wait for a follower
            raise
        finally:
            await end_tasks(starts, END_OF_TASKS_S)
        self._port = self._process.port
        if self._replica is None:
            timeouts = {"request_timeout_s": self._rollout.request_timeout_s, "control_timeout_s": self._weight_sync_s}
            self._replica = HttpReplica(self._process.url, **timeouts)
        return self._process.url

    async def restart(self) -> str:
        """End what is left of the server and start another at the same URL, paused: it has the weights of the start."""
        assert self._process is not None, "start() comes first"
        await asyncio.to_thread(self._process.stop, 0.0)
        async with self._syncing:  # a sync under way fails now; its last word, `resume`, must not reach the new server
            return await self.start(paused=True)

    async def sync(self, parameter_server: ray.actor.ActorHandle, version: PolicyVersion, mode: str = "keep") -> SyncResult:
        """Bring `version` to the server, which decodes on until it is there, and then stands still for the change itself.

        Args:
            parameter_server: Holds the version.
            version: What to serve.
            mode: What happens to running requests: `keep` (they go on with the new weights), `abort` (they are given back as they
                are) or `wait` (they end first, and new ones wait).

        Raises:
            EngineError: The server could not take it and serves what it did.
            WeightSyncError: The version is not held.
        """
        assert self._replica is not None, "start() comes first"
        async with self._syncing:
            began = time.perf_counter()
            async with self._pulled(parameter_server, version) as (manifest, brought):
                await self._replica.stage_weights(manifest)
            paused = time.perf_counter()
            try:
                await self._replica.pause(mode)
                report = await self._replica.finish_weights(version)
            finally:
                await self._replica.resume()  # also after a pause that did not come about: it may still be waiting for turns
            now = time.perf_counter()
            return SyncResult(report=report, seconds=now - began, paused_s=now - paused, brought=brought)

    async def load(self) -> InstanceLoad:
        """How busy the server is now; tokens per second over the last seconds."""
        assert self._replica is not None, "start() comes first"
        metrics = await self._replica.metrics()
        return InstanceLoad(
            num_running=int(metrics["psrl_engine_running"]),
            num_waiting=int(metrics["psrl_engine_waiting"]),
            tokens_per_s=metrics["psrl_engine_tokens_per_s"],
            cache_usage=metrics["psrl_engine_cache_usage"],
        )

    async def resume(self) -> None:
        """Go on after a start that was paused."""
        assert self._replica is not None, "start() comes first"
        await self._replica.resume()

    async def watch(self) -> None:
        """Never returns; raises when the server that runs now, or a follower, has ended or answers nothing.

        Raises:
            EngineError: With what happened and last words.
        """
        assert self._process is not None, "start() comes first"
        raise EngineError(await first_done((self._process.lost(), *self._followers.losses())))

    async def stop(self) -> None:
        """End the server."""
        if self._replica is not None:
            await self._replica.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.stop)
        await self._followers.stop()

    @asynccontextmanager
    async def _pulled(self, parameter_server: ray.actor.ActorHandle, version: PolicyVersion) -> AsyncIterator[tuple[WeightManifest, Flow]]:
        """The version where this node can map it, and where those of the followers can; it stays there while the body runs."""
        lease, manifest, writer = await parameter_server.begin_pull.remote(version)
        try:
            (here, brought), others = await asyncio.gather(
                self._node_weights.local(manifest, writer), self._followers.bring(manifest, writer)
            )
            for _, flow in others:
                brought.join(flow)
            yield with_followers(here, [there for there, _ in others]), brought
        finally:
            await parameter_server.end_pull.remote(lease)

    def _new_process(self, node: NodeOfInstance | None, *, is_paused: bool) -> ChildProcess:
        argv = [*engine_command(self._model, self._rollout, node=node), *(["--paused"] if is_paused else [])]
        wait_s = PORT_WAIT_S if self._port else 0.0
        return ChildProcess(self._name, argv, log_path=self._log_path, host=self._host, port=self._port, port_wait_s=wait_s)
