"""Where the processes of a run are, in Ray's terms: which node each is given to, at which address it listens, and where it goes when its
node is lost.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from psrl.config.nodes import Node, Room
from psrl.config.placement import CONTROLLER_CPUS, REPLICAS, Placement, Role, place_agent_worker, place_replica
from psrl.errors import ConfigError, ProcessDiedError

LOOPBACK = "127.0.0.1"
ANSWER_S = 1.0
"""A raylet that takes no connection for so long is gone; Ray itself needs some fifteen seconds to say so."""
GENERATING = (*REPLICAS, Role.FOLLOWER)
RANK_SHARE, REPLICA_SHARE = 0.6, 0.4
"""Of a GPU, to Ray, where a train worker and a replica have it together. Ray fills the GPU that has the least left: two halves could be
two ranks, which NCCL refuses. With more than half each, ranks are apart; replicas, which come after them, then fit only what ranks left."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayNode:
    """A node of the cluster that Ray runs on."""

    id: str
    address: str
    port: int
    """Of its raylet."""

    def answers(self) -> bool:
        """Whether its raylet takes connections."""
        try:
            socket.create_connection((self.address, self.port), timeout=ANSWER_S).close()
        except OSError:
            return False
        return True


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowerPlace:
    """Where a replica that spans nodes has one of its followers."""

    options: dict[str, Any]
    """Ray's."""
    host: str
    """Address of its node."""


class Places:
    """The nodes of a run, and the one that each process has. What is started again after its node was lost gets another.

    Servers listen on loopback while the run has one node. Where it has several they listen on their node's address, which must be a
    private one: the control routes of engines have no key.
    """

    def __init__(
        self, placement: Placement, ray_nodes: Sequence[RayNode], *, alive: Callable[[Sequence[RayNode]], list[bool]] | None = None
    ) -> None:
        """`ray_nodes` are the nodes of `placement`, in its order; `alive` says which of them live, None asks Ray and their raylets.

        Raises:
            ConfigError: The run has several nodes, and one that it uses has a public address.
        """
        self._placement = placement
        self._ray_nodes = tuple(ray_nodes)
        self._alive = alive or nodes_alive
        self._places = {role: list(places) for role, places in placement.places.items()}
        self.spans_nodes = placement.spans_nodes
        if self.spans_nodes:
            for index in {0, *(place for places in self._places.values() for place in places)}:
                _check_private(self._ray_nodes[index])

    @property
    def anchor(self) -> str:
        """Address of the node with rank 0, the parameter server and TransferQueue's storage."""
        return self._ray_nodes[self._places[Role.PARAMETER_SERVER][0]].address

    @property
    def storage_resource(self) -> str | None:
        """Ray's own resource of that node, by which TransferQueue finds it; None while there is one node."""
        return f"node:{self.anchor}" if self.spans_nodes else None

    def options(self, role: Role, index: int) -> dict[str, Any]:
        """Ray's options of one process."""
        gpus = self._placement.gpus_of(role, index)
        node = self._ray_nodes[self._places[role][index]]
        return {
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node.id, soft=False),
            "num_gpus": self._share(role, index) * gpus if self._placement.shares_gpus else gpus,
        }

    def device(self, role: Role, index: int) -> str:
        """`cuda` or `cpu`."""
        return "cuda" if self._placement.gpus_of(role, index) else "cpu"

    def threads(self, role: Role, index: int) -> int:
        """Cores of the node, shared among its processes of this kind."""
        place = self._places[role][index]
        roles = GENERATING if role in GENERATING else (role,)
        return max(1, self._placement.nodes[place].machine.num_cores // sum(self._places[each].count(place) for each in roles))

    def num_nodes(self, role: Role, index: int) -> int:
        """That a replica spans."""
        return self._placement.demand.nodes_of(role)[index]

    def followers(self, role: Role, index: int) -> list[FollowerPlace]:
        """Of one replica, by node rank."""
        of_it = self._followers_of(role, index)
        return [FollowerPlace(options=self.options(Role.FOLLOWER, one), host=self.address(Role.FOLLOWER, one)) for one in of_it]

    def count(self, role: Role) -> int:
        """Processes of a kind."""
        return len(self._places[role])

    def address(self, role: Role, index: int) -> str:
        """Of the node of one process."""
        return self._ray_nodes[self._places[role][index]].address

    def addresses(self, role: Role, index: int) -> list[str]:
        """Of the nodes of one process: several for a replica that spans them."""
        followers = self._followers_of(role, index)
        return [self.address(role, index), *(self.address(Role.FOLLOWER, one) for one in followers)]

    def host(self, role: Role, index: int) -> str:
        """Where one process listens."""
        return self.address(role, index) if self.spans_nodes else LOOPBACK

    def settle(self, role: Role, index: int) -> bool:
        """Before a replica or an agent worker is started again: another place where its node is lost. Whether it has another one now.

        A replica that spans nodes gets all of its places anew where one of them is lost.

        Raises:
            ProcessDiedError: No node that lives has room.
        """
        if not self.spans_nodes:
            return False
        alive, followers = self._alive(self._ray_nodes), self._followers_of(role, index)
        held = [self._places[role][index], *(self._places[Role.FOLLOWER][one] for one in followers)]
        if all(alive[place] for place in held):
            return False
        room = self._room_on(alive, {(role, index), *((Role.FOLLOWER, one) for one in followers)})
        try:
            if role in REPLICAS:
                places = place_replica(room, self._placement.gpus_of(role, index), num_nodes=self.num_nodes(role, index))
            else:
                others = [place for other, place in enumerate(self._places[role]) if other != index and alive[place]]
                places = (place_agent_worker(room, [place for place in self._places[Role.REPLICA] if alive[place]], others),)
        except ConfigError as error:
            lost = next(self._ray_nodes[place].address for place in held if not alive[place])
            raise ProcessDiedError(f"node {lost} of {role.value} {index} is lost, and no other has room: {error.rule}") from error
        self._places[role][index] = places[0]
        for one, place in zip(followers, places[1:], strict=True):
            self._places[Role.FOLLOWER][one] = place
        return True

    def lines(self) -> list[str]:
        """What is where now, a line for each node, and how servers can be reached."""
        now = replace(self._placement, places={role: tuple(places) for role, places in self._places.items()})
        if not self.spans_nodes:
            return now.lines()
        return [*now.lines(), "servers listen on their nodes' addresses, without keys: the network between the nodes must be private"]

    def _followers_of(self, role: Role, index: int) -> list[int]:
        """Their indices, by node rank."""
        followers = self._placement.demand.followers
        return [one for one, follower in enumerate(followers) if (follower.role, follower.index) == (role, index)]

    def _share(self, role: Role, index: int) -> float:
        """Of each of its GPUs. On a node with more replicas than ranks, those that find no rank beside them have theirs alone."""
        if role not in REPLICAS:
            return RANK_SHARE
        node = self._places[role][index]
        here = [(each, other) for each in REPLICAS for other, place in enumerate(self._places[each]) if place == node]
        return REPLICA_SHARE if here.index((role, index)) < self._places[Role.TRAIN_WORKER].count(node) else 1.0

    def _room_on(self, alive: Sequence[bool], leaving: Collection[tuple[Role, int]]) -> Room:
        """What is free on nodes that live, without the processes that go."""
        nodes = [node if lives else _without_room(node) for node, lives in zip(self._placement.nodes, alive, strict=True)]
        room = Room(nodes)
        if alive[0]:
            room.take(0, cpus=CONTROLLER_CPUS)
        for role, places in self._places.items():
            for process, place in enumerate(places):
                if alive[place] and role is not Role.GATEWAY and (role, process) not in leaving:
                    # Where GPUs are shared, replicas find those of train workers free.
                    is_counted = role in GENERATING or not self._placement.shares_gpus
                    gpus = self._placement.gpus_of(role, process) if is_counted else 0
                    room.take(place, gpus=gpus, is_computing=role in (*GENERATING, Role.TRAIN_WORKER) and gpus == 0)
        return room


def nodes_alive(ray_nodes: Sequence[RayNode]) -> list[bool]:
    """Of each, whether Ray counts on it and its raylet answers."""
    known = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return [node.id in known and node.answers() for node in ray_nodes]


def _without_room(node: Node) -> Node:
    return replace(node, num_cpus=0, machine=replace(node.machine, num_gpus=0))


def _check_private(node: RayNode) -> None:
    if not ipaddress.ip_address(node.address).is_private:
        rule = "is a public address, and the engines' control routes have no key"
        fix = "start Ray there with `--node-ip-address` of a private network"
        raise ConfigError(key="psrl.ray_address", value=node.address, rule=rule, fix=fix)


def interface_of(address: str) -> str | None:
    """Name of this machine's network interface with an address; None where it has none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            return name
    return None
