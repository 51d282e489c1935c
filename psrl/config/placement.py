"""Which process of a run goes to which node: beside what it talks to.

Train workers lie on as few nodes as possible, filled one after the other in the order of their ranks; the parameter server and
TransferQueue's storage beside rank 0, which writes the weights and reads the rows; agent workers beside the replicas that sample their
turns; what the driver needs on the driver's node, which is the first. Integers only: the same rules make the plan of described nodes and
the placement of a run.

A replica that spans nodes serves on its first one; on each of the others it has a follower.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn

from psrl.config.deployment_checks import check_on_cpus, instance_nodes, instance_sizes
from psrl.config.gateway_checks import starts_gateway
from psrl.config.nodes import Node, Room
from psrl.config.tree import Config
from psrl.errors import ConfigError

CONTROLLER_CPUS = 1
"""Of TransferQueue's controller, for which Ray finds a place: on the driver's node, while that is less than half full."""
CUDA, CPU, AUTO = "cuda", "cpu", "auto"


class Role(StrEnum):
    """Kinds of processes that are placed."""

    TRAIN_WORKER = "train worker"
    PARAMETER_SERVER = "parameter server"
    STORAGE = "TransferQueue storage"
    REPLICA = "engine replica"
    VALIDATION_REPLICA = "validation replica"
    FOLLOWER = "follower"
    AGENT_WORKER = "agent worker"
    GATEWAY = "gateway"


REPLICAS = (Role.REPLICA, Role.VALIDATION_REPLICA)


@dataclass(frozen=True, kw_only=True, slots=True)
class Follower:
    """Which replica a follower belongs to."""

    role: Role
    index: int
    """Of the replica, among those of its role."""
    node_rank: int
    """From 1; the replica itself has 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """What a run has to place."""

    num_ranks: int
    rank_gpus: int
    """Of each: 0 or 1."""
    instance_gpus: tuple[int, ...]
    """Of each engine replica."""
    validation_gpus: tuple[int, ...] = ()
    """Of each replica that serves validation alone."""
    instance_nodes: tuple[int, ...] = ()
    """That each engine replica spans; empty: one."""
    validation_nodes: tuple[int, ...] = ()
    num_agent_workers: int
    num_storage_units: int
    has_gateway: bool
    share_gpus: str
    """`never`, `auto` or `always`."""

    @property
    def num_cpus(self) -> int:
        """Logical CPUs of all processes, the parameter server and TransferQueue's controller among them."""
        num_replicas = len(self.instance_gpus) + len(self.validation_gpus) + len(self.followers)
        return self.num_ranks + num_replicas + self.num_agent_workers + self.num_storage_units + 1 + CONTROLLER_CPUS

    @property
    def num_gpus(self) -> int:
        """Where nothing is shared."""
        return self.num_ranks * self.rank_gpus + self.num_instance_gpus

    @property
    def num_instance_gpus(self) -> int:
        """Of all replicas."""
        return sum(self.instance_gpus) + sum(self.validation_gpus)

    @property
    def followers(self) -> tuple[Follower, ...]:
        """Of all replicas; a follower's index is its position here."""
        return tuple(
            Follower(role=role, index=index, node_rank=rank)
            for role in REPLICAS
            for index, num_nodes in enumerate(self.nodes_of(role))
            for rank in range(1, num_nodes)
        )

    def nodes_of(self, role: Role) -> tuple[int, ...]:
        """How many nodes each replica spans."""
        if role is Role.REPLICA:
            return self.instance_nodes or (1,) * len(self.instance_gpus)
        return self.validation_nodes or (1,) * len(self.validation_gpus)

    def gpus_on_node(self, role: Role, index: int) -> int:
        """Of one replica, on each of its nodes."""
        gpus = self.instance_gpus if role is Role.REPLICA else self.validation_gpus
        return gpus[index] // self.nodes_of(role)[index]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The node of every process."""

    nodes: tuple[Node, ...]
    """The driver's first."""
    demand: Demand
    places: dict[Role, tuple[int, ...]]
    """Index of a node, by the index of the process."""
    shares_gpus: bool
    """Whether a train worker and a replica have the same GPU."""

    @property
    def spans_nodes(self) -> bool:
        """Whether processes are on more than one node."""
        return len({0, *(node for places in self.places.values() for node in places)}) > 1

    def count(self, role: Role, node: int) -> int:
        """Processes of a kind on a node."""
        return self.places[role].count(node)

    def gpus_of(self, role: Role, index: int) -> int:
        """GPUs that one process has, its own or shared."""
        if role is Role.TRAIN_WORKER:
            return self.demand.rank_gpus
        if role is Role.FOLLOWER:
            follower = self.demand.followers[index]
            return self.demand.gpus_on_node(follower.role, follower.index)
        return self.demand.gpus_on_node(role, index) if role in REPLICAS else 0

    def lines(self) -> list[str]:
        """A line for each node that is used."""
        said = []
        for index, node in enumerate(self.nodes):
            parts = ["driver"] if index == 0 else []
            for role, places in self.places.items():
                here = [process for process, place in enumerate(places) if place == index]
                if here and role is Role.FOLLOWER:
                    parts += self._lines_of_followers(here)
                elif here:
                    gpus = sum(self.gpus_of(role, process) for process in here)
                    on = f" on {gpus}{' shared' if self.shares_gpus else ''} GPU{'s' if gpus > 1 else ''}" if gpus else ""
                    parts.append(f"{role.value} {spans_of(here)}{on}" if len(places) > 1 else f"{role.value}{on}")
            if parts:
                said.append(f"{node.name}: {', '.join(parts)}")
        return said

    def _lines_of_followers(self, here: Sequence[int]) -> list[str]:
        """By the replicas that they belong to."""
        said = []
        for role in REPLICAS:
            of_role = [one for one in here if self.demand.followers[one].role is role]
            gpus = sum(self.gpus_of(Role.FOLLOWER, one) for one in of_role)
            if of_role:
                number = f" {spans_of([self.demand.followers[one].index for one in of_role])}" if len(self.places[role]) > 1 else ""
                said.append(f"follower of {role.value}{number}" + (f" on {gpus} GPU{'s' if gpus > 1 else ''}" if gpus else ""))
        return said


def demand_of(config: Config, nodes: Sequence[Node], *, with_training: bool) -> Demand:
    """What a run has to place. A device `auto` is a GPU where any of the nodes has one.

    Raises:
        ConfigError: A device needs a GPU that no node has, or instances cannot be on CPUs as they are.
    """
    rollout = config.gen_actor_rollout_ref.rollout
    has_gpus = any(node.machine.num_gpus for node in nodes)
    rank_device = resolved(config.trainer.device, has_gpus, "trainer.device") if with_training else CPU
    sizes, num_nodes = instance_sizes(config), instance_nodes(config)
    num_validation = config.psrl.deployment.num_validation_instances if with_training else 0
    device = CPU if rollout.name == "scripted" else resolved(rollout.device, has_gpus, "gen_actor_rollout_ref.rollout.device")
    if device == CPU:
        check_on_cpus(config)
    return Demand(
        num_ranks=config.trainer.num_workers if with_training else 0,
        rank_gpus=int(rank_device == CUDA),
        instance_gpus=sizes if device == CUDA else (0,) * rollout.num_replicas,
        validation_gpus=(sizes[0] if device == CUDA else 0,) * num_validation,
        instance_nodes=num_nodes,
        validation_nodes=num_nodes[:1] * num_validation,
        num_agent_workers=rollout.agent.num_workers,
        num_storage_units=config.transfer_queue.num_data_storage_units,
        has_gateway=starts_gateway(config),
        share_gpus=config.psrl.deployment.share_gpus,
    )


def resolved(device: str, has_gpus: bool, key: str) -> str:
    """`cuda` or `cpu`. ConfigError: `cuda`, and no node has a GPU."""
    if device == CUDA and not has_gpus:
        raise ConfigError(key=key, value=device, rule="no node of the run has a CUDA GPU", fix=f"set {key}=cpu or {key}=auto")
    return (CUDA if has_gpus else CPU) if device == AUTO else device


def place(demand: Demand, nodes: Sequence[Node]) -> Placement:
    """Place every process.

    Raises:
        ConfigError: The nodes have too few logical CPUs or GPUs, or no node has as many GPUs as an instance needs.
    """
    shares = _shares(demand, nodes)
    room = Room(nodes)
    room.take(0, cpus=CONTROLLER_CPUS)
    ranks = _ranks(demand, room)
    anchor = ranks[0] if ranks else 0
    if shares:
        room.free_gpus = [node.machine.num_gpus for node in nodes]  # once more, for the instances
    replicas, validating = (_replicas(demand, role, room) for role in REPLICAS)
    firsts = tuple(places[0] for places in replicas)
    return Placement(
        nodes=tuple(nodes),
        demand=demand,
        places={
            Role.TRAIN_WORKER: ranks,
            Role.PARAMETER_SERVER: (anchor,),
            Role.STORAGE: (anchor,) * demand.num_storage_units,
            Role.REPLICA: firsts,
            Role.VALIDATION_REPLICA: tuple(places[0] for places in validating),
            Role.FOLLOWER: tuple(place for places in (*replicas, *validating) for place in places[1:]),
            Role.AGENT_WORKER: _agent_workers(demand.num_agent_workers, room, firsts),
            Role.GATEWAY: (0,) if demand.has_gateway else (),
        },
        shares_gpus=shares,
    )


def _shares(demand: Demand, nodes: Sequence[Node]) -> bool:
    """Whether GPUs are shared."""
    key, available = "psrl.deployment.share_gpus", sum(node.machine.num_gpus for node in nodes)
    could = demand.num_ranks * demand.rank_gpus > 0 and demand.num_instance_gpus > 0
    wants = could and (demand.share_gpus == "always" or (demand.share_gpus == "auto" and demand.num_gpus > available))
    needed = max(demand.num_ranks * demand.rank_gpus, demand.num_instance_gpus) if wants else demand.num_gpus
    if needed > available:
        rule = (
            f"train workers and instances need {needed} GPUs{' although they share them' if wants else ''}, and the nodes have {available}"
        )
        fix = "lower trainer.num_workers or psrl.deployment.num_instances"
        raise ConfigError(key=key, value=demand.share_gpus, rule=rule, fix=fix)
    if wants and max(demand.instance_gpus) > 1:
        rule = (
            f"an instance of {max(demand.instance_gpus)} GPUs shares none with train workers, and for both there are too few ({available})"
        )
        raise ConfigError(key=key, value=demand.share_gpus, rule=rule, fix="add nodes, or make instances smaller")
    return wants


def _ranks(demand: Demand, room: Room) -> tuple[int, ...]:
    """Few nodes, filled in order; the first also holds the parameter server and the storage."""
    beside = 1 + demand.num_storage_units
    if demand.num_ranks == 0:
        room.take(0, cpus=beside)
        return ()
    left, places, has_anchor = demand.num_ranks, [], False
    while left:
        extra = 0 if has_anchor else beside
        fits = [_capacity(room, node, demand.rank_gpus, extra) for node in range(len(room.nodes))]
        holding = [node for node, count in enumerate(fits) if count >= left]
        # One that holds all that are left: the driver's, else the one with the least to spare; else the one that holds most.
        node = min(holding, key=lambda node: (node != 0, fits[node])) if holding else max(range(len(fits)), key=fits.__getitem__)
        if fits[node] < 1:
            room.take(node, cpus=room.free_cpus[node] + 1)
        count = min(left, fits[node])
        room.take(node, cpus=count + extra, gpus=count * demand.rank_gpus)
        room.num_computing[node] += count
        places += [node] * count
        left, has_anchor = left - count, True
    return tuple(places)


def _capacity(room: Room, node: int, gpus: int, extra_cpus: int) -> int:
    cpus = max(0, room.free_cpus[node] - extra_cpus)
    return min(cpus, room.free_gpus[node]) if gpus else cpus


def _replicas(demand: Demand, role: Role, room: Room) -> list[tuple[int, ...]]:
    """Nodes of each replica. The largest first. With GPUs where the least is left over, so that large ones find room; without, where the
    fewest compute."""
    num_nodes = demand.nodes_of(role)
    sizes = [demand.gpus_on_node(role, index) for index in range(len(num_nodes))]
    places: dict[int, tuple[int, ...]] = dict.fromkeys(range(len(sizes)), ())
    for index in sorted(places, key=lambda index: (-sizes[index], -num_nodes[index])):
        places[index] = place_replica(room, sizes[index], num_nodes=num_nodes[index])
    return list(places.values())


def place_replica(room: Room, gpus: int, *, num_nodes: int = 1) -> tuple[int, ...]:
    """The nodes of one replica, `gpus` of each; it serves on the first.

    Raises:
        ConfigError: Too few nodes have room.
    """
    places: list[int] = []
    for _ in range(num_nodes):
        holding = [node for node in room.holding(gpus=gpus) if node not in places]
        if not holding:
            _refuse_replica(room, gpus, num_nodes)
        node = min(holding, key=lambda node: (room.free_gpus[node] if gpus else room.load(node), node))
        places.append(room.take(node, gpus=gpus, is_computing=gpus == 0))
    return tuple(places)


def _refuse_replica(room: Room, gpus: int, num_nodes: int) -> NoReturn:
    have = ", ".join(f"{node.name} {free} of {node.machine.num_gpus}" for node, free in zip(room.nodes, room.free_gpus, strict=True))
    if num_nodes > 1:
        rule = f"no {num_nodes} nodes have {gpus} free GPUs and a logical CPU each for an instance; free GPUs are: {have}"
        raise ConfigError(key="psrl.deployment.nodes_per_instance", value=num_nodes, rule=rule, fix="set fewer, or add nodes")
    rule = f"no node has {gpus} free GPUs and a logical CPU for an instance; free GPUs are: {have}"
    raise ConfigError(key="psrl.deployment.gpus_per_instance", value=gpus, rule=rule, fix="make instances smaller, or add nodes")


def _agent_workers(count: int, room: Room, replicas: Sequence[int]) -> tuple[int, ...]:
    places: list[int] = []
    for _ in range(count):
        places.append(place_agent_worker(room, replicas, places))
    return tuple(places)


def place_agent_worker(room: Room, replicas: Sequence[int], workers: Sequence[int]) -> int:
    """The node of one agent worker: where most replicas are for each worker; where these have no room, any that has.

    Raises:
        ConfigError: No node has room.
    """
    holding = room.holding() or [0]
    best = max(holding, key=lambda node: (replicas.count(node) / (workers.count(node) + 1), room.free_cpus[node], -node))
    return room.take(best)


def spans_of(numbers: Sequence[int]) -> str:
    """Ascending numbers, for people.

    Example:
        [0, 1, 2, 5] -> "0-2, 5"
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
