"""Weights on the nodes that the trainer does not run on: one copy for all replicas of a node."""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from psrl.errors import WeightSyncError
from psrl.parameter_server.transports.nixl_cpu import NixlReader
from psrl.parameter_server.transports.shared_memory import SharedVersion, publish
from psrl.protocols import WeightManifest
from psrl.runtime.placement import interface_of
from psrl.telemetry.flow import Flow
from psrl.types import PolicyVersion

if TYPE_CHECKING:
    from psrl.parameter_server.transports.nccl import NcclReader

NODE = "node"
"""In a manifest's location: the node on which the path means something."""
PS_MODE = "ps_mode"
"""In a manifest's location: how other nodes get it."""
NUM_KEPT = 2
READ_TIMEOUT_S = 120.0
"""Of a version by NIXL or NCCL; the lease of a pull is as long by default."""
MAX_HOLDERS = 3
"""Actors of a node that are asked for one version; two may have ended since the last."""
CPU_REF, NCCL = "cpu_ref", "nccl"


def name_interface() -> None:
    """Let gloo and NCCL in this process talk over the network that Ray's nodes use: a host name may stand for loopback."""
    interface = interface_of(ray.util.get_node_ip_address())
    if interface is not None:
        os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


class NodeWeights:
    """The versions on this node, for one process that reads them. The actor that holds them ends with the process that made it."""

    def __init__(self) -> None:
        self._holder: ray.actor.ActorHandle | None = None
        """Kept: an actor that nobody has a handle of ends, and a new one would begin with seconds of imports."""

    async def local(self, manifest: WeightManifest, writer: str) -> tuple[WeightManifest, Flow]:
        """The version where processes of this node can map it, and what came over the network for it.

        Args:
            manifest: As it was pushed.
            writer: Name of the train worker that has its bytes. Not a handle: to read one, a process imports all that the worker imports.

        Waits for: the transfer, where nobody here has the version yet. Unblocked by: the writer, or its death; with NIXL and NCCL also
        by READ_TIMEOUT_S.
        """
        node = ray.get_runtime_context().get_node_id()
        if manifest.location[NODE] == node:
            return manifest, Flow()
        for _ in range(MAX_HOLDERS):
            if self._holder is None:
                self._holder = _holder_on(node, manifest)
            try:
                brought: tuple[WeightManifest, Flow] = await self._holder.bring.remote(manifest, writer)
                return brought
            except RayActorError as error:
                dead, self._holder = self._holder, None
                if isinstance(error, RayTaskError):
                    raise  # of another actor, which the holder asked
                # It ended, by itself or with the replica that had made it. While that has a handle, Ray keeps the name for the dead.
                ray.kill(dead)
        raise WeightSyncError(f"version {manifest.version}: {MAX_HOLDERS} processes that hold weights on this node ended one after another")


def _holder_on(node: str, manifest: WeightManifest) -> ray.actor.ActorHandle:
    """The actor of a node, made where there is none."""
    return NodeWeightsActor.options(
        name=f"node-weights-{node}",
        get_if_exists=True,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        **(_card_of_this_process() if manifest.location[PS_MODE] == NCCL else {}),
    ).remote()


def _card_of_this_process() -> dict[str, Any]:
    """Options of an actor that sees the first of this process's GPUs, and takes none from Ray.

    Ray gives an actor without GPUs of its own the environment of its node, where all of them can be seen (2.60; with
    `RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=1`, as in older releases, none).
    """
    cards = sorted(str(card) for card in ray.get_gpu_ids())
    seen = {"CUDA_VISIBLE_DEVICES": cards[0]} if cards else {}
    return {"runtime_env": {"env_vars": {**seen, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}}}


@ray.remote(num_cpus=0, max_restarts=0)
class NodeWeightsActor:
    """The last versions on one node. It ends with the replica that asked for it first; another is made by whoever asks next."""

    def __init__(self) -> None:
        self._versions: dict[PolicyVersion, SharedVersion] = {}
        self._bringing = asyncio.Lock()
        self._nixl: NixlReader | None = None
        self._nccl: NcclReader | None = None

    async def bring(self, manifest: WeightManifest, writer: str) -> tuple[WeightManifest, Flow]:
        """Where the version lies on this node; fetched for the first who asks, and what that took.

        Raises:
            WeightSyncError: The writer no longer has it, or memory is short.
        """
        flow = Flow()
        async with self._bringing:
            shared = self._versions.get(manifest.version)
            if shared is None or shared.manifest.checksum != manifest.checksum:
                began = time.perf_counter()
                buffer = await self._bytes_of(manifest, ray.get_actor(writer))
                flow.add(buffer.nbytes, time.perf_counter() - began)
                shared = await asyncio.to_thread(publish, manifest, [(0, buffer)])
                superseded = self._versions.pop(manifest.version, None)
                if superseded is not None:
                    superseded.close()
                self._versions[manifest.version] = shared
                for old in sorted(self._versions)[:-NUM_KEPT]:
                    self._versions.pop(old).close()
            return shared.manifest, flow

    async def _bytes_of(self, manifest: WeightManifest, writer: ray.actor.ActorHandle) -> np.ndarray:
        """Sent by the writer through Ray's object store or card to card, or read from its memory by NIXL."""
        mode = manifest.location[PS_MODE]
        if mode == CPU_REF:
            sent: np.ndarray = await writer.weights.remote(manifest.version)
            return sent
        if mode == NCCL:
            return await self._from_card_to_card(manifest.version, writer)
        if self._nixl is None:
            self._nixl = NixlReader()
        offer = await writer.offer_weights.remote(manifest.version)
        return await asyncio.to_thread(self._nixl.read, offer, timeout_s=READ_TIMEOUT_S)

    async def _from_card_to_card(self, version: PolicyVersion, writer: ray.actor.ActorHandle) -> np.ndarray:
        """A group that was kept from an earlier version may have broken since: then once more, over a new one.

        Waits for: the transfer. Unblocked by: its end, the end of the writer, or READ_TIMEOUT_S.
        """
        from psrl.parameter_server.transports.nccl import NcclReader  # torch, which the other modes do without

        while True:
            if self._nccl is None:
                name_interface()
                self._nccl = NcclReader()
            reader, was_kept, is_whole = self._nccl, self._nccl.has_group, False
            here = ray.get_runtime_context().get_node_id()
            try:
                offer = await writer.offer_group.remote(version, reader=here, session=reader.session)
                reading = asyncio.to_thread(reader.read, offer, timeout_s=READ_TIMEOUT_S)
                both = asyncio.gather(reading, writer.send_weights.remote(offer, timeout_s=READ_TIMEOUT_S))
                buffer: np.ndarray = (await asyncio.wait_for(both, READ_TIMEOUT_S))[0]
                is_whole = True
                return buffer
            except WeightSyncError:
                if not was_kept:
                    raise
            except (RayActorError, TimeoutError) as error:
                raise WeightSyncError(f"version {version} did not come from the trainer: {error or type(error).__name__}") from error
            finally:
                if not is_whole:
                    self._nccl = None
                    await asyncio.to_thread(reader.close)
