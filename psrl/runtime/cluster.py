"""Ray: started on this machine or joined, and left again.

Logical CPUs are counted, not bound: what each process may really use is its thread setting. A local start therefore announces as
many as the plan needs, so that no actor waits without a word for a CPU that does not exist.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from psrl.config.deployment_checks import LOCAL
from psrl.config.machine import Machine
from psrl.config.nodes import Node
from psrl.config.placement import Placement, demand_of, place
from psrl.config.plan_of_nodes import PlanOfNodes, check_as_described, make_plan_of_nodes
from psrl.config.tree import Config
from psrl.errors import ConfigError, ProcessDiedError
from psrl.runtime import PROCESS_ENVIRONMENT
from psrl.runtime.devices import usable_machine
from psrl.runtime.placement import Places, RayNode

OBJECT_STORE_BYTES = 400 * 2**20
"""For what calls carry: groups with their episodes. Weights and rows travel beside it."""
NEEDED_OF_RAY = ("gcs_server", "raylet")
LOOK_S = 0.5
KNOCK_S = 10.0
"""For a head node to take a connection."""
TRANSFER_QUEUE_NAMESPACE = "transfer_queue"
TRANSFER_QUEUE_CONTROLLER = "TransferQueueController"
"""Where the released TransferQueue registers its controller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayOfRun:
    """Ray while a run uses it."""

    processes: RayProcesses
    places: Places


class RayProcesses:
    """The processes of Ray itself on this machine. All others of the run need them, and end with them."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self._processes = {process: process.name() for process in processes}

    def dead(self) -> str | None:
        """What to say of one that ended; None while all live."""
        for process, name in self._processes.items():
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return f"its process {name} (pid {process.pid}) ended"
        return None

    async def ended(self) -> str:
        """Why Ray cannot be used any more. Waits for: the end of one of its processes, looked at twice a second. Never returns before."""
        while (words := self.dead()) is None:  # noqa: ASYNC110 - a process that is not ours has no event to wait for
            await asyncio.sleep(LOOK_S)
        return words


@contextmanager
def ray_of(config: Config, *, with_training: bool = True) -> Iterator[RayOfRun]:
    """Ray while the body runs; a local one ends after it with all its processes.

    Must be entered by the main thread: the kernel ends Ray's processes when the thread that started them ends.

    Raises:
        ConfigError: `psrl.ray_address` joins a cluster and none runs there, or its nodes cannot hold the run.
        ProcessDiedError: Ray did not start.
    """
    is_local = config.psrl.ray_address == LOCAL
    if is_local:
        here = Node(name="this machine", machine=usable_machine(), num_cpus=0)
        demand = demand_of(config, [here], with_training=with_training)
        here = replace(here, num_cpus=demand.num_cpus)
        _start(here)
    else:
        _join(config.psrl.ray_address)
    try:
        if is_local:
            placement, ray_nodes = place(demand, [here]), ray_nodes_alive()
        else:
            placement, ray_nodes = _plan_of_cluster(config, with_training=with_training)
        yield RayOfRun(processes=RayProcesses(_processes_of_ray(ray_nodes[0], is_local=is_local)), places=Places(placement, ray_nodes))
    finally:
        ray.shutdown()


def read_cluster(config: Config) -> tuple[list[Node], list[RayNode]]:
    """The nodes of the cluster that this process has joined, the one that it runs on first.

    Raises:
        ProcessDiedError: A node does not say what it has.
    """
    ray_nodes = ray_nodes_alive()
    looks = [
        ray.remote(num_cpus=0, max_retries=0)(usable_machine)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False))
        .remote()
        for node in ray_nodes
    ]
    try:
        machines: list[Machine] = ray.get(looks, timeout=config.psrl.deadlines.startup_s)
    except ray.exceptions.RayError as error:
        raise ProcessDiedError(f"a node of the cluster does not say what it has: {error}") from error
    resources = {node["NodeID"]: node["Resources"] for node in ray.nodes()}
    nodes = []
    for node, machine in zip(ray_nodes, machines, strict=True):
        has = resources[node.id]
        num_gpus = min(machine.num_gpus, int(has["GPU"])) if "GPU" in has else 0
        num_cpus = int(has["CPU"]) if "CPU" in has else 0
        nodes.append(Node(name=node.address, machine=replace(machine, num_gpus=num_gpus), num_cpus=num_cpus))
    return nodes, ray_nodes


def plan_of_cluster(config: Config, *, with_training: bool = True) -> PlanOfNodes:
    """What a run would be on the cluster that `psrl.ray_address` names; it is joined for the look alone.

    Raises:
        ConfigError: No cluster runs there, or its nodes cannot hold the run.
    """
    _join(config.psrl.ray_address)
    try:
        return make_plan_of_nodes(config, read_cluster(config)[0], with_training=with_training)
    finally:
        ray.shutdown()


def ray_nodes_alive() -> list[RayNode]:
    """The one that this process runs on, then the others by address; of one that was just lost Ray does not know yet, its raylet tells."""
    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    alive.sort(key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"], node["NodeID"]))
    nodes = [RayNode(id=node["NodeID"], address=node["NodeManagerAddress"], port=node["NodeManagerPort"]) for node in alive]
    return [node for node in nodes if node.id == here or node.answers()]


def _plan_of_cluster(config: Config, *, with_training: bool) -> tuple[Placement, list[RayNode]]:
    nodes, ray_nodes = read_cluster(config)
    if config.psrl.deployment.num_nodes:
        check_as_described(config, nodes)
    return make_plan_of_nodes(config, nodes, with_training=with_training).placement, ray_nodes


def _processes_of_ray(here: RayNode, *, is_local: bool) -> list[psutil.Process]:
    """Those that this process started, or, in a cluster that it joined, the raylet of its node."""
    if is_local:
        return [child for child in psutil.Process().children() if child.name() in NEEDED_OF_RAY]
    # Of several raylets on one machine, only this node's is needed: it is the one that listens on the node's port.
    return [process for process in psutil.process_iter(["name", "uids"]) if _is_raylet_at(process, here.port)]


def _is_raylet_at(process: psutil.Process, port: int) -> bool:
    if process.info["name"] != "raylet" or process.info["uids"].real != os.getuid():
        return False
    return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in process.net_connections("tcp"))


def _start(here: Node) -> None:
    try:
        ray.init(
            address="local",
            num_cpus=here.num_cpus,
            num_gpus=here.machine.num_gpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:
        raise ProcessDiedError(f"Ray did not start on this machine: {error}") from error


def _join(address: str) -> None:
    key, fix = "psrl.ray_address", "start one with `ray start --head`, or set local"
    try:
        _knock(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env={"env_vars": PROCESS_ENVIRONMENT})
    except (OSError, RuntimeError, ValueError, OverflowError, ray.exceptions.RayError) as error:  # no address, nobody there, other versions
        raise ConfigError(key=key, value=address, rule=f"no Ray cluster answers ({error})", fix=fix) from error
    try:
        ray.get_actor(TRANSFER_QUEUE_CONTROLLER, namespace=TRANSFER_QUEUE_NAMESPACE)
    except ValueError:
        return
    ray.shutdown()
    rule = "another run uses this cluster's TransferQueue, of which there is one"
    raise ConfigError(key=key, value=address, rule=rule, fix="wait for its end, or start a cluster for this run")


def _knock(address: str) -> None:
    """See that somebody listens at `host:port`; Ray itself would try for over two minutes. What is written otherwise Ray looks up.

    Raises:
        OSError, OverflowError: Nobody does, or there is no such port.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=KNOCK_S).close()
