"""The plan that a command makes before it starts anything: of this machine, of described nodes, or of a cluster that runs."""

from __future__ import annotations

from psrl.config.plan import Plan
from psrl.config.plan_of_nodes import PlanOfNodes
from psrl.config.tree import Config


def check_plan(config: Config, *, with_training: bool = True) -> Plan | None:
    """The plan of this machine, which must hold it; None for a cluster, which is looked at when the run has joined it.

    Raises:
        ConfigError: It cannot.
    """
    from psrl.config.deployment_checks import LOCAL
    from psrl.config.machine import read_machine
    from psrl.config.plan import make_plan

    if config.psrl.ray_address == LOCAL:
        return make_plan(config, read_machine(), with_training=with_training)
    return None


def plan_to_show(config: Config) -> Plan | PlanOfNodes:
    """Of the nodes that the settings describe, else of the cluster that they join, else of this machine.

    Raises:
        ConfigError: They cannot hold the run, or no cluster answers.
    """
    from psrl.config.deployment_checks import LOCAL
    from psrl.config.machine import read_machine
    from psrl.config.plan import make_plan
    from psrl.config.plan_of_nodes import described_nodes, make_plan_of_nodes

    nodes = described_nodes(config)
    if nodes:
        return make_plan_of_nodes(config, nodes)
    if config.psrl.ray_address == LOCAL:
        return make_plan(config, read_machine())
    from psrl.runtime.cluster import plan_of_cluster

    return plan_of_cluster(config)
