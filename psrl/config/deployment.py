"""`psrl.deployment`: on which nodes and GPUs the processes of a run live."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class DeploymentConfig:
    """Engine replicas (instances) by number and size, and the nodes that a plan is made for.

    A list holds one number for all instances (nodes), or one for each.
    """

    num_instances: int = 0
    """Engine replicas; 0 takes gen_actor_rollout_ref.rollout.num_replicas, which this setting sets otherwise."""
    gpus_per_instance: list[int] = field(default_factory=list)
    """GPUs of an instance. Empty: tensor x pipeline x data parallel size of gen_actor_rollout_ref.rollout. Given, the tensor parallel size
    follows: GPUs / (pipeline x data parallel size), which may differ between instances."""
    nodes_per_instance: list[int] = field(default_factory=list)
    """Nodes that an instance spans, each with as many of its GPUs (on CPUs: of its workers). Empty: one. More only with vLLM."""
    num_validation_instances: int = 0
    """Replicas beside these that serve validation alone, as large as the first: training's go on with newer weights meanwhile. 0: a version
    is validated on training's replicas, which are held at it."""
    share_gpus: str = "auto"
    """Whether a train worker and an instance may have the same GPU: `never`, `always`, or `auto`: only where there are too few for both.
    Instances of more than one GPU share none."""
    num_nodes: int = 0
    """Nodes that the run is planned for, as described below; 0: this machine, or those of the cluster that psrl.ray_address joins.
    A run on described nodes starts only on a cluster that has them; `--dry-run` needs neither the cluster nor the model and rows here."""
    cores_per_node: list[int] = field(default_factory=list)
    memory_gib_per_node: list[int] = field(default_factory=list)
    gpus_per_node: list[int] = field(default_factory=list)
    """Empty: none."""
    gpu_memory_gib: list[int] = field(default_factory=list)
    """Of one GPU of a node. Empty: what is on GPUs is not checked."""


def one_for_each(values: list[int], count: int) -> list[int]:
    """A list of the section, with one number for each.

    Example:
        [8], 3 -> [8, 8, 8]
    """
    return values * count if len(values) == 1 else values
