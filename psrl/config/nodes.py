"""The nodes of a run, and what is still free on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from psrl.config.machine import Machine
from psrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A machine that runs a part of the run."""

    name: str
    machine: Machine
    num_cpus: int
    """Logical CPUs that Ray counts there: one for each process of the run."""


class Room:
    """What is still free on each node."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = tuple(nodes)
        self.free_cpus = [node.num_cpus for node in nodes]
        self.free_gpus = [node.machine.num_gpus for node in nodes]
        self.num_computing = [0] * len(self.nodes)
        """Processes that compute on the node's cores."""

    def take(self, node: int, *, cpus: int = 1, gpus: int = 0, is_computing: bool = False) -> int:
        """Give a process its place; the node."""
        if self.free_cpus[node] < cpus:
            self._short(cpus)
        self.free_cpus[node] -= cpus
        self.free_gpus[node] -= gpus
        self.num_computing[node] += is_computing
        return node

    def holding(self, *, gpus: int = 0) -> list[int]:
        """Nodes with a free logical CPU and so many free GPUs."""
        return [node for node in range(len(self.nodes)) if self.free_cpus[node] >= 1 and self.free_gpus[node] >= gpus]

    def load(self, node: int) -> float:
        """Computing processes per core."""
        return self.num_computing[node] / self.nodes[node].machine.num_cores

    def _short(self, cpus: int) -> None:
        have = ", ".join(f"{node.name} {node.num_cpus}" for node in self.nodes)
        rule = f"the processes of the run need one logical CPU each, and these are too few where they are needed: {have}"
        raise ConfigError(key="psrl.deployment", value=f"{cpus} more", rule=rule, fix="add nodes, or lower num_workers and num_instances")
