"""Ray shell of one training rank. All calls of a rank run in one thread, because OpenMP's settings belong to threads."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import ray
import torch

from psrl.config.actor import ActorConfig, RefConfig
from psrl.config.algorithm import AlgorithmConfig
from psrl.config.model import ModelConfig
from psrl.data_plane import KVBatchMeta
from psrl.data_plane.transfer_queue import TransferQueueDataPlane
from psrl.parameter_server.layout import checksum, lay_out, pack
from psrl.protocols import WeightManifest
from psrl.runtime.devices import resolved_device
from psrl.runtime.imports import make_importable
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
    total_steps: int
    seed: int
    device: str
    rank: int
    world_size: int
    collective_timeout_s: float
    data_plane_deadline_s: float
    startup_deadline_s: float
    import_folder: str
    """Put on sys.path, so that a user's own loss or advantage beside their YAML is found."""


@ray.remote(num_cpus=1, max_restarts=0)
class TrainWorkerActor:
    """One FSDP2 rank."""

    def __init__(self, *, settings: TrainWorkerSettings) -> None:
        self._settings = settings
        make_importable(settings.import_folder)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="train-rank")
        self._data_plane = TransferQueueDataPlane(deadline_s=settings.data_plane_deadline_s, startup_deadline_s=settings.startup_deadline_s)
        self._rank: TrainRank | None = None

    async def rendezvous(self) -> str:
        """An address on this node that all ranks can meet at."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    async def load(self, init_method: str) -> None:
        """Join the process group and load the model."""
        s = self._settings
        self._rank = TrainRank(
            model=s.model,
            actor=s.actor,
            ref=s.ref,
            algorithm=s.algorithm,
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

    async def train_step(self, meta: KVBatchMeta) -> dict[str, float]:
        """One buffer: one or several optimizer updates."""
        return await self._in_thread(lambda: self._the_rank.train_step(meta))

    async def push(self, parameter_server: ray.actor.ActorHandle, version: PolicyVersion) -> WeightManifest | None:
        """Gather the weights; rank 0 publishes them as `version`. A push that fails half-way is never visible."""
        is_writer = self._settings.rank == 0
        if is_writer:
            await parameter_server.begin_push.remote(version)
        tensors = await self._in_thread(lambda: self._the_rank.named_full_tensors())
        if not is_writer:
            return None
        manifest, buffer = await self._in_thread(lambda: packed(tensors, version))
        await parameter_server.commit_push.remote(manifest, [ray.put(buffer)])
        return manifest

    async def save(self, folder: Path) -> None:
        """Weights, optimizer, schedule and RNG into `folder`."""
        await self._in_thread(lambda: self._the_rank.save(folder))

    async def restore(self, folder: Path) -> None:
        """What `save` wrote."""
        await self._in_thread(lambda: self._the_rank.load(folder))

    async def export(self, folder: Path) -> None:
        """The weights as a plain Hugging Face folder."""
        await self._in_thread(lambda: self._the_rank.save_hf(folder))

    async def stay(self) -> None:
        """Never returns: whoever waits for it learns of this process's death."""
        await asyncio.Event().wait()

    @property
    def _the_rank(self) -> TrainRank:
        assert self._rank is not None, "load() comes first"
        return self._rank

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


def packed(tensors: dict[str, torch.Tensor], version: PolicyVersion) -> tuple[WeightManifest, np.ndarray]:
    """All tensors in one flat buffer, with the manifest that describes it."""
    manifest = lay_out(tensors.items(), version=version)
    buffer = np.zeros(manifest.total_bytes, dtype=np.uint8)
    pack(tensors.items(), manifest, buffer)
    return dataclasses.replace(manifest, checksum=checksum(buffer)), buffer
