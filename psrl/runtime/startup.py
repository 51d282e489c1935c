"""The start of a run's processes: a checklist with limits, and the watch over what it brought up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from psrl.config.placement import Role
from psrl.config.tree import Config
from psrl.errors import ConfigError, DeadlineError, ProcessDiedError
from psrl.gateway.gateway import GatewayAddress
from psrl.runtime.build import Cluster
from psrl.runtime.cluster import TRANSFER_QUEUE_CONTROLLER, TRANSFER_QUEUE_NAMESPACE, RayProcesses
from psrl.runtime.groups import Endpoints
from psrl.runtime.placement import Places
from psrl.runtime.supervision import Supervisor, answer_of, end_of

LOOK_DEADLINE_S = 30.0
TRANSFER_QUEUE_STORAGE = "TransferQueueStorageUnit#{rank}"
"""Name under which the released TransferQueue registers a storage unit, in the namespace of the run."""


class Checklist:
    """Parts of the start-up, each with its limit."""

    def __init__(self, *, limit_s: float, done: Callable[[str], None]) -> None:
        """`done` is told of each part."""
        self._limit_s = limit_s
        self._done = done
        self._began_s = time.monotonic()
        self._open: dict[str, None] = {}
        self._closed: dict[str, float] = {}

    def __str__(self) -> str:
        """Every part that is up, with the seconds that it took since the list was begun."""
        return ", ".join(f"{what} {seconds:.1f} s" for what, seconds in self._closed.items())

    async def step(self, what: str, *awaitables: object) -> list[Any]:
        """One part; its results.

        Raises:
            PsrlError: What failed, by name; at the limit with what is up and what is still awaited.
        """
        self._open[what] = None
        try:
            results: list[Any] = await answer_of(what, asyncio.gather(*awaitables), self._limit_s)  # type: ignore[call-overload]
        except DeadlineError as error:
            raise DeadlineError(f"start-up: {error} (up: {str(self) or 'nothing'}; awaited: {', '.join(self._open)})") from error
        del self._open[what]
        self._closed[what] = time.monotonic() - self._began_s
        self._done(what)
        return results


async def start_cluster(cluster: Cluster, config: Config, *, ray_processes: RayProcesses, checklist: Checklist) -> Supervisor:
    """Bring every process up; the supervisor watches them from then on.

    Raises:
        PsrlError: The first part that failed, by name, within `psrl.deadlines.startup_s`.
    """

    async def train_workers() -> None:
        if cluster.train_workers:
            (address,) = await checklist.step("train worker 0", cluster.train_workers[0].rendezvous.remote())
            await checklist.step("train workers", *(worker.load.remote(address) for worker in cluster.train_workers))

    async def engines_and_gateway() -> None:
        engines = checklist.step("engines", *(replica.start() for replica in cluster.fleet.all_replicas))
        if cluster.gateway is None:
            urls, num_training = await engines, len(cluster.fleet.replicas)
            cluster.endpoints.set(Endpoints(generate_urls=urls[:num_training], validation_urls=urls[num_training:]))
            return
        urls, (address,) = await asyncio.gather(engines, checklist.step("gateway", cluster.gateway.handle.start.remote()))
        await checklist.step("engines in SMG", cluster.gateway.handle.attach.remote(urls))
        cluster.endpoints.set(endpoints_of(config, urls, address))

    workers = cluster.workers.workers
    storage = asyncio.to_thread(cluster.data_plane.start, config.transfer_queue, node_resource=cluster.places.storage_resource)
    async with asyncio.TaskGroup() as starts:
        starts.create_task(engines_and_gateway())
        starts.create_task(train_workers())
        starts.create_task(checklist.step("agent workers", *(worker.handle.start.remote() for worker in workers)))
        starts.create_task(checklist.step("TransferQueue", storage))
    await checklist.step(
        "connections",
        *(worker.connect.remote() for worker in cluster.train_workers),
        *(worker.handle.connect.remote(cluster.endpoints.get()) for worker in workers),
    )
    await checklist.step("watch", *(kept.ready() for kept in cluster.kept))
    return _supervisor_of(cluster, config, ray_processes)


async def check_run_folder(cluster: Cluster, folder: Path) -> None:
    """Whether every rank sees the run folder, into which all of them write checkpoints; asked where a run has several nodes.

    Raises:
        ConfigError: One does not.
    """
    if not cluster.places.spans_nodes:
        return
    looks = asyncio.gather(*(worker.sees.remote(folder) for worker in cluster.train_workers))
    check_seen(folder, await answer_of("look of the train workers at the run folder", looks, LOOK_DEADLINE_S), cluster.places)


def check_seen(folder: Path, seen: Sequence[bool], places: Places) -> None:
    """`seen` says of each rank whether it sees the folder. ConfigError: One does not."""
    for rank, is_seen in enumerate(seen):
        if not is_seen:
            rule = f"is not on {places.address(Role.TRAIN_WORKER, rank)}, where train worker {rank} writes its part of each checkpoint"
            fix = "name a folder on a file system that the driver's node and those of the ranks share"
            raise ConfigError(key="trainer.default_local_dir", value=str(folder), rule=rule, fix=fix)


def endpoints_of(config: Config, urls: list[str], gateway: GatewayAddress) -> Endpoints:
    """Where agent workers send turns when there is a gateway."""
    return Endpoints(generate_urls=[gateway.smg_url] if config.psrl.rollout_gateway.enable else urls, gateway=gateway)


def _supervisor_of(cluster: Cluster, config: Config, ray_processes: RayProcesses) -> Supervisor:
    silent_after_s = config.psrl.deadlines.stall_s
    supervisor = Supervisor()
    supervisor.watch("Ray", ray_processes.ended())
    for name, actor in transfer_queue_actors(config.transfer_queue.num_data_storage_units).items():
        supervisor.watch(name, end_of(actor, ping=lambda foreign: foreign.__ray_ready__.remote(), silent_after_s=silent_after_s))
    for index, worker in enumerate(cluster.train_workers):
        supervisor.watch(f"train worker {index}", end_of(worker, silent_after_s=silent_after_s))
    for kept in cluster.kept:
        supervisor.keep(kept.name, kept.keep())
    return supervisor


def transfer_queue_actors(num_storage_units: int) -> dict[str, ray.actor.ActorHandle]:
    """Its controller and storage units, by the name that errors call them.

    Raises:
        ProcessDiedError: One of them is not registered with Ray (any more).
    """
    places = {"TransferQueue's controller": (TRANSFER_QUEUE_CONTROLLER, TRANSFER_QUEUE_NAMESPACE)}
    for rank in range(num_storage_units):
        places[f"TransferQueue's storage unit {rank}"] = (TRANSFER_QUEUE_STORAGE.format(rank=rank), None)
    found = {}
    for name, (registered, namespace) in places.items():
        try:
            found[name] = ray.get_actor(registered, namespace=namespace)
        except ValueError as error:
            raise ProcessDiedError(f"{name} died at the start: {error}") from error
    return found
