"""Ray shell of one training rank. All calls of a rank run in one thread, because OpenMP's settings belong to threads."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import ray
from ray.exceptions import RayActorError

from psrl.config.actor import ActorConfig, RefConfig
from psrl.config.algorithm import AlgorithmConfig
from psrl.config.critic import CriticConfig
from psrl.config.model import ModelConfig
from psrl.data_plane import KVBatchMeta
from psrl.data_plane.transfer_queue import TransferQueueDataPlane
from psrl.errors import WeightSyncError
from psrl.parameter_server.transports.nccl import GroupOffer, NcclWriter
from psrl.parameter_server.transports.nixl_cpu import MemoryOffer, NixlWriter
from psrl.parameter_server.transports.shared_memory import SharedVersion, open_version
from psrl.parameter_server.versions import Lease
from psrl.protocols import WeightManifest
from psrl.runtime.actors.node_weights import NODE, PS_MODE, name_interface
from psrl.runtime.actors.pinged import Pinged
from psrl.runtime.devices import resolved_device
from psrl.runtime.imports import make_importable
from psrl.telemetry.flow import Flow
from psrl.training.worker import TrainRank
from psrl.types import PolicyVersion

Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainWorkerSettings:
    """What one rank is made of."""

    model: ModelConfig
    actor: ActorConfig
    ref: RefConfig
    algorithm: AlgorithmConfig
    critic: CriticConfig
    critic_warmup: int
    total_steps: int
    seed: int
    device: str
    rank: int
    world_size: int
    collective_timeout_s: float
    data_plane_deadline_s: float
    startup_deadline_s: float
    ps_mode: str = "cpu_ref"
    """How weights reach other nodes."""
    export_dtype: str | None
    """Of the exported weights; None: as model.dtype."""
    import_folder: str
    """Put on sys.path, so that a user's own loss or advantage beside their YAML is found."""


@ray.remote(num_cpus=1, max_restarts=0)
class TrainWorkerActor(Pinged):
    """One FSDP2 rank."""

    def __init__(self, *, settings: TrainWorkerSettings) -> None:
        self._settings = settings
        make_importable(settings.import_folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train-rank")
        self._data_plane = TransferQueueDataPlane(deadline_s=settings.data_plane_deadline_s, startup_deadline_s=settings.startup_deadline_s)
        self._rank: TrainRank | None = None
        self._published: dict[PolicyVersion, SharedVersion] = {}
        """Of rank 0: what the parameter server holds."""
        self._nixl: NixlWriter | None = None
        self._nccl: NcclWriter | None = None

    async def rendezvous(self) -> str:
        """An address on this node that all ranks can meet at."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    async def load(self, init_method: str) -> None:
        """Join the process group and load the model."""
        name_interface()
        s = self._settings
        self._rank = TrainRank(
            model=s.model,
            actor=s.actor,
            ref=s.ref,
            algorithm=s.algorithm,
            critic=s.critic,
            critic_warmup=s.critic_warmup,
            total_steps=s.total_steps,
            seed=s.seed,
            device=resolved_device(s.device),
            rank=s.rank,
            world_size=s.world_size,
            data_plane=self._data_plane,
            timeout_s=s.collective_timeout_s,
        )
        await self._in_thread(lambda: self._the_rank.setup(init_method))

    async def connect(self) -> None:
        """Attach to the data plane, which the driver has started meanwhile."""
        await self._in_thread(self._data_plane.connect)

    async def train_step(self, meta: KVBatchMeta, *, version: PolicyVersion) -> dict[str, float]:
        """One buffer, that of `version`: one or several optimizer updates."""
        return await self._in_thread(lambda: self._the_rank.train_step(meta, version=version))

    async def push(self, parameter_server: ray.actor.ActorHandle, version: PolicyVersion) -> WeightManifest | None:
        """Gather the weights; rank 0 publishes them as `version`. A push that fails half-way is never visible.

        Every rank gathers, whatever becomes of the parameter server, so that the ranks stay in step; after that their threads are free.
        """
        shared = await self._in_thread(lambda: self._the_rank.publish(version))
        if shared is None:
            return None
        is_committed = False
        try:
            lease = await parameter_server.begin_push.remote(version)
            try:
                manifest = await self._commit(parameter_server, lease, shared)
                is_committed = True
            finally:
                if not is_committed:
                    with contextlib.suppress(RayActorError):
                        await parameter_server.abort_push.remote(lease)
        finally:
            if not is_committed:
                shared.close()
        return manifest

    async def republish(self, parameter_server: ray.actor.ActorHandle) -> None:
        """Give a new parameter server the versions that the old one held; nothing is gathered, and training goes on meanwhile."""
        held = await parameter_server.held.remote()
        for version in sorted(self._published):
            if not held or version > max(held):
                await self._commit(parameter_server, await parameter_server.begin_push.remote(version), self._published[version])

    async def weights(self, version: PolicyVersion) -> np.ndarray:
        """The bytes of a version that was pushed, for nodes that cannot map them: uint8, read-only.

        Raises:
            WeightSyncError: It is no longer held.
        """
        buffer = self._mapped(version)
        buffer.flags.writeable = False
        return buffer

    async def offer_weights(self, version: PolicyVersion) -> MemoryOffer:
        """Where NIXL finds what `weights` would return; nothing is sent. WeightSyncError: it is no longer held, or there is no NIXL."""
        buffer = await self.weights(version)
        if self._nixl is None:
            self._nixl = NixlWriter()
        return self._nixl.offer(version, buffer)

    async def offer_group(self, version: PolicyVersion, *, reader: str, session: str) -> GroupOffer:
        """Where a reader on another node meets this process for a version, which `send_weights` then sends it.

        Raises:
            WeightSyncError: It is no longer held.
        """
        buffer = self._mapped(version)
        if self._nccl is None:
            self._nccl = NcclWriter(host=ray.util.get_node_ip_address(), device=resolved_device(self._settings.device))
        return await asyncio.to_thread(self._nccl.offer, version, buffer, reader=reader, session=session)

    async def send_weights(self, offer: GroupOffer, *, timeout_s: float) -> None:
        """Send what was offered, in a thread of its own beside the rank's: training goes on meanwhile.

        Waits for: the transfer. Unblocked by: its end, the end of the reader, or `timeout_s`.

        Raises:
            WeightSyncError: The version was withdrawn, or the reader is lost.
        """
        assert self._nccl is not None, "offer_group() comes first"
        try:
            await asyncio.wait_for(asyncio.to_thread(self._nccl.send, offer, timeout_s=timeout_s), timeout_s)
        except TimeoutError as error:
            raise WeightSyncError(f"version {offer.version} was not sent to {offer.reader} within {timeout_s:g} s") from error

    async def sees(self, folder: Path) -> bool:
        """Whether a folder of the driver's is there on this node, too."""
        return folder.is_dir()

    async def take_flow(self) -> Flow:
        """Rows that it took out of the data plane since the last call."""
        return self._data_plane.flow.take()

    async def save(self, folder: Path) -> None:
        """Weights, optimizer, schedule and RNG into `folder`."""
        await self._in_thread(lambda: self._the_rank.save(folder))

    async def restore(self, folder: Path) -> None:
        """What `save` wrote."""
        await self._in_thread(lambda: self._the_rank.load(folder))

    async def export(self, folder: Path) -> None:
        """The weights as a plain Hugging Face folder."""
        await self._in_thread(lambda: self._the_rank.save_hf(folder, dtype=self._settings.export_dtype))

    @property
    def _the_rank(self) -> TrainRank:
        assert self._rank is not None, "load() comes first"
        return self._rank

    async def _commit(self, parameter_server: ray.actor.ActorHandle, lease: Lease, shared: SharedVersion) -> WeightManifest:
        """Make a written version visible, and free what nobody can pull any more."""
        here = {NODE: ray.get_runtime_context().get_node_id(), PS_MODE: self._settings.ps_mode}
        location = shared.manifest.location | here
        manifest = dataclasses.replace(shared.manifest, location=location)
        held = await parameter_server.commit_push.remote(lease, manifest, ray.get_runtime_context().get_actor_name() or "")
        self._published[manifest.version] = shared
        for old in [old for old in self._published if old < manifest.version and old not in held]:
            self._published.pop(old).close()
        for transport in (self._nixl, self._nccl):
            if transport is not None:
                transport.keep_only(set(self._published))
        return manifest

    def _mapped(self, version: PolicyVersion) -> np.ndarray:
        if version not in self._published:
            raise WeightSyncError(f"version {version} is no longer held; held: {sorted(self._published)}")
        return open_version(self._published[version].manifest)

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)
