"""Several raylets on this machine as the nodes of a cluster, each at an address of its own, and runs on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
from ray.cluster_utils import Cluster

import psrl.runtime  # noqa: F401 - sets the environment of what Ray starts
from psrl.config.machine import Machine
from psrl.config.nodes import Node
from psrl.config.placement import Demand, place
from psrl.runtime.cluster import ray_nodes_alive
from psrl.runtime.placement import Places

SECOND_ADDRESS, THIRD_ADDRESS = "127.0.0.2", "127.0.0.3"
"""Of this machine's loopback network: private addresses that are not the first node's."""
CPUS = 16
"""Logical ones, of each node."""
SETTINGS = ("psrl.ray_address={address}", "gen_actor_rollout_ref.rollout.num_threads=1", "train_actor_rollout_ref.actor.num_threads=1")
ONE_INSTANCE_OVER_BOTH = Demand(
    num_ranks=1,
    rank_gpus=0,
    instance_gpus=(0,),
    instance_nodes=(2,),
    num_agent_workers=1,
    num_storage_units=1,
    has_gateway=False,
    share_gpus="auto",
)


class TwoNodes:
    """A cluster of two nodes; drivers on this machine belong to the first."""

    def __init__(self, *, cpus_of_first: int = CPUS) -> None:
        head = {"num_cpus": cpus_of_first, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.add_second()

    def add_second(self) -> None:
        """Start the second node; again, after it was killed."""
        self._second = self._cluster.add_node(num_cpus=CPUS, node_ip_address=SECOND_ADDRESS)

    def add_third(self) -> None:
        """Start one more, before a run joins."""
        self._cluster.add_node(num_cpus=CPUS, node_ip_address=THIRD_ADDRESS)

    @property
    def address(self) -> str:
        """To join it."""
        return self._cluster.address

    def settings(self) -> tuple[str, ...]:
        """Of a run on it."""
        return tuple(setting.format(address=self.address) for setting in SETTINGS)

    def processes_of_second(self) -> list[psutil.Process]:
        """Its raylet, and every process that this started."""
        raylets = [one[0].process for one in self._second.all_processes.values() if "raylet" in one[0].process.args[0]]
        raylet = psutil.Process(raylets[0].pid)
        return [raylet, *raylet.children(recursive=True)]

    def kill_second(self) -> None:
        """As if its power went: every process of it at once."""
        processes = self.processes_of_second()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def close(self) -> None:
        """End both."""
        self._cluster.shutdown()


@contextmanager
def two_nodes(**options: int) -> Iterator[TwoNodes]:
    """The cluster while the body runs."""
    nodes = TwoNodes(**options)
    try:
        yield nodes
    finally:
        nodes.close()


def places_of_one_instance() -> Places:
    """Of a run whose one engine instance spans both nodes; Ray is joined."""
    nodes = [Node(name=str(n), machine=Machine(num_cores=1, memory_bytes=2**34), num_cpus=CPUS) for n in (0, 1)]
    return Places(place(ONE_INSTANCE_OVER_BOTH, nodes), ray_nodes_alive())
