"""The plan of a run on several nodes: what lies where, and whether each node can hold its part.

Of described nodes (`psrl.deployment.num_nodes`) nothing is asked: the plan of a cluster can be made on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from psrl.config.deployment import one_for_each
from psrl.config.machine import Machine
from psrl.config.nodes import Node
from psrl.config.placement import REPLICAS, Placement, Role, demand_of, place
from psrl.config.plan import Plan, checked, planned_processes
from psrl.config.plan_of_cards import BROUGHT, CUDA_CONTEXT_BYTES, NCCL_BYTES, STAGING_BYTES, check_cards
from psrl.config.plan_of_engines import WEIGHT_VERSIONS_KEPT
from psrl.config.planned_process import PROCESS_BYTES, PlannedProcess
from psrl.config.transport_checks import NCCL, check_transport_between, nodes_beyond_trainer
from psrl.config.tree import Config
from psrl.errors import ConfigError

GIB = 2**30
COUNTED = {"train worker": Role.TRAIN_WORKER, "agent worker": Role.AGENT_WORKER, "parameter server": Role.PARAMETER_SERVER}
"""Role of a planned process -> role by which it is placed."""
ON_GATEWAY_NODE = ("gateway", "SMG", "session router")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOfNodes:
    """One plan for each node that is used."""

    placement: Placement
    plans: dict[str, Plan]
    """By the node's name."""


def described_nodes(config: Config) -> tuple[Node, ...]:
    """The nodes that `psrl.deployment` describes; empty where it describes none."""
    deployment = config.psrl.deployment
    count = deployment.num_nodes
    if not count:
        return ()
    cores, memory = one_for_each(deployment.cores_per_node, count), one_for_each(deployment.memory_gib_per_node, count)
    gpus, gpu_memory = one_for_each(deployment.gpus_per_node or [0], count), one_for_each(deployment.gpu_memory_gib or [0], count)
    return tuple(
        Node(
            name=f"node {index}",
            machine=Machine(
                num_cores=cores[index], memory_bytes=memory[index] * GIB, num_gpus=gpus[index], gpu_bytes=gpu_memory[index] * GIB
            ),
            num_cpus=cores[index],
        )
        for index in range(count)
    )


def make_plan_of_nodes(config: Config, nodes: Sequence[Node], *, with_training: bool = True) -> PlanOfNodes:
    """Place the processes, and work out whether each node can hold those that it gets.

    Raises:
        ConfigError: They cannot; the message names the node.
    """
    placement = place(demand_of(config, nodes, with_training=with_training), nodes)
    if with_training:
        check_transport_between(config, placement)
    plans = {}
    for index, node in enumerate(nodes):
        rows = tuple(row for row in _rows_of(config, placement, index, with_training=with_training) if row.count)
        try:
            check_cards(config, rows, node.machine, placement)
            plans[node.name] = checked(Plan(machine=node.machine, processes=rows))
        except ConfigError as error:
            raise ConfigError(key=error.key, value=error.value, rule=f"{node.name}: {error.rule}", fix=error.fix) from error
    return PlanOfNodes(placement=placement, plans=plans)


def check_as_described(config: Config, nodes: Sequence[Node]) -> None:
    """Whether a cluster has the nodes that the settings describe: each of them a node of its own with as much of everything.

    Raises:
        ConfigError: It has not.
    """
    left = list(nodes)
    for wanted in sorted(described_nodes(config), key=lambda node: (-node.machine.num_gpus, -node.machine.num_cores)):
        found = next((node for node in left if _has(node, wanted.machine)), None)
        if found is None:
            machine = wanted.machine
            has = "; ".join(f"{node.name}: {node.machine.num_gpus} GPUs, {node.num_cpus} CPUs" for node in nodes)
            rule = f"describes a node of {machine.num_gpus} GPUs and {machine.num_cores} cores that the cluster has not ({has})"
            fix = "join a cluster that has it, or describe the one that there is"
            raise ConfigError(key="psrl.deployment.num_nodes", value=config.psrl.deployment.num_nodes, rule=rule, fix=fix)
        left.remove(found)


def _has(node: Node, wanted: Machine) -> bool:
    # Memory is left to the plan: what a machine has for programs is always less than what is printed on it.
    return node.machine.num_gpus >= wanted.num_gpus and node.num_cpus >= wanted.num_cores


def _rows_of(config: Config, placement: Placement, index: int, *, with_training: bool) -> list[PlannedProcess]:
    """What the plan of the whole run says of each kind of process, with as many of it as lie on one node."""
    rows = []
    agents = placement.count(Role.AGENT_WORKER, index)
    num_replicas = sum(placement.count(role, index) for role in (*REPLICAS, Role.FOLLOWER))
    cores = placement.nodes[index].machine.num_cores
    # What has GPUs has them wherever it is, also where this node has none.
    machine = replace(placement.nodes[index].machine, num_gpus=max(node.machine.num_gpus for node in placement.nodes))
    whole = planned_processes(config, machine, with_training=with_training)
    for row in whole:
        if row.role in COUNTED:
            count = placement.count(COUNTED[row.role], index)
        elif row.role.endswith(" engine"):
            count = num_replicas
        elif row.role == "TransferQueue":
            count = placement.count(Role.STORAGE, index) + (index == 0)
        elif row.role == "controller":
            count = int(index == 0)
        elif row.role in ON_GATEWAY_NODE:
            count = placement.count(Role.GATEWAY, index)
        else:  # sandboxes and programs of episodes lie with the agent workers
            count = -(-row.count * agents // max(1, config.gen_actor_rollout_ref.rollout.agent.num_workers))
        rows.append(replace(row, count=count, num_cores=_cores_of(row, count, cores)))
    is_sent_by_card = with_training and config.psrl.ps_mode == NCCL
    if is_sent_by_card and placement.count(Role.PARAMETER_SERVER, index):  # of rank 0 alone, in equal rows
        sent = (STAGING_BYTES + NCCL_BYTES) * len(nodes_beyond_trainer(placement))
        rows = [replace(row, gpu_bytes=row.gpu_bytes + sent) if row.role == "train worker" else row for row in rows]
    if with_training and num_replicas and not placement.count(Role.PARAMETER_SERVER, index):
        server = next(row for row in whole if row.role == "parameter server")
        versions = server.memory_bytes - PROCESS_BYTES["plain"]
        reason = f"{WEIGHT_VERSIONS_KEPT} versions that were brought here, and one on its way, for the replicas of the node"
        held = PROCESS_BYTES["torch"] + versions
        on_card = CUDA_CONTEXT_BYTES + STAGING_BYTES + NCCL_BYTES if is_sent_by_card else 0
        rows.append(replace(server, role=BROUGHT, count=1, memory_bytes=held, gpu_bytes=on_card, reason=reason))
    return rows


def _cores_of(row: PlannedProcess, count: int, cores: int) -> int:
    """Threads of each: where they share the cores, they share those of their node."""
    return min(row.num_cores, max(1, cores // count)) if row.num_cores and count else row.num_cores
