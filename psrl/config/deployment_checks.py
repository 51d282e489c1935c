"""What `psrl.deployment` says together with the rest: nothing twice, nothing without effect, lists of the right length."""

from __future__ import annotations

from psrl.config.deployment import one_for_each
from psrl.config.gateway_checks import starts_gateway
from psrl.config.refusals import refuse_dead
from psrl.config.tree import Config
from psrl.errors import ConfigError

KEY = "psrl.deployment"
REPLICAS = "gen_actor_rollout_ref.rollout.num_replicas"
TENSOR = "gen_actor_rollout_ref.rollout.tensor_model_parallel_size"
DATA = "gen_actor_rollout_ref.rollout.data_parallel_size"
LISTS_OF_NODES = ("cores_per_node", "memory_gib_per_node", "gpus_per_node", "gpu_memory_gib")
LISTS_OF_GPUS = ("gpus_per_node", "gpu_memory_gib")
LOCAL = "local"


def derive_instances(config: Config) -> None:
    """Let `psrl.deployment` set the number of replicas, where it says one.

    Raises:
        ConfigError: The number is said twice, differently.
    """
    deployment = config.psrl.deployment
    listed = len(deployment.gpus_per_instance)
    said = deployment.num_instances or (listed if listed > 1 else 0)
    if listed > 1 and listed != said:
        rule = f"has {listed} numbers, and there are {said} instances"
        _refuse("gpus_per_instance", deployment.gpus_per_instance, rule, f"write one number for all instances, or {said}")
    if not said:
        return
    for rollout in (config.gen_actor_rollout_ref.rollout, config.train_actor_rollout_ref.rollout):
        if rollout.num_replicas not in (1, said):
            rule = f"says {said} instances, and {REPLICAS} says {rollout.num_replicas}"
            _refuse("num_instances", said, rule, f"leave {REPLICAS} out, or {KEY}.num_instances")
        rollout.num_replicas = said


def check_deployment(config: Config) -> None:
    """Instances and described nodes.

    Raises:
        ConfigError: The first setting that contradicts another or can have no effect.
    """
    if max(instance_nodes(config)) > 1 and config.psrl.ray_address == LOCAL:
        rule = "is more than this machine, on which psrl.ray_address=local starts Ray"
        _refuse("nodes_per_instance", config.psrl.deployment.nodes_per_instance, rule, "set psrl.ray_address=auto")
    if config.psrl.deployment.num_validation_instances and starts_gateway(config):
        rule = "has no effect behind the gateway, where SMG chooses among all replicas"
        _refuse("num_validation_instances", config.psrl.deployment.num_validation_instances, rule, "leave it out")
    _check_nodes(config)


def instance_sizes(config: Config) -> tuple[int, ...]:
    """GPUs of each instance, where instances have GPUs.

    Raises:
        ConfigError: The sizes do not fit the parallel sizes of the engine.
    """
    rollout, listed = config.gen_actor_rollout_ref.rollout, config.psrl.deployment.gpus_per_instance
    inner = rollout.pipeline_model_parallel_size * rollout.data_parallel_size
    if not listed:
        return (rollout.tensor_model_parallel_size * inner,) * rollout.num_replicas
    sizes = tuple(one_for_each(listed, rollout.num_replicas))
    if len(sizes) != rollout.num_replicas:
        rule = f"has {len(sizes)} numbers, and there are {rollout.num_replicas} instances"
        _refuse("gpus_per_instance", listed, rule, f"write one number for all instances, or {rollout.num_replicas}")
    for size in sizes:
        if size < 1 or size % inner:
            rule = f"has {size}, which is no positive multiple of pipeline x data parallel size ({inner})"
            _refuse("gpus_per_instance", listed, rule, f"write multiples of {inner}")
        if size != 1 and rollout.name != "vllm":
            rule = f"has {size}, and the {rollout.name} engine has one GPU at most"
            _refuse("gpus_per_instance", listed, rule, "set gen_actor_rollout_ref.rollout.name=vllm, or leave it out")
        if rollout.tensor_model_parallel_size not in (1, size // inner):
            rule = f"asks for a tensor parallel size of {size // inner}, and {TENSOR} says {rollout.tensor_model_parallel_size}"
            _refuse("gpus_per_instance", listed, rule, f"leave {TENSOR} out, or {KEY}.gpus_per_instance")
    return sizes


def instance_nodes(config: Config) -> tuple[int, ...]:
    """Nodes that each instance spans.

    Raises:
        ConfigError: The engine cannot span nodes, or its sizes do not divide over so many.
    """
    rollout, listed = config.gen_actor_rollout_ref.rollout, config.psrl.deployment.nodes_per_instance
    sizes = instance_sizes(config)
    counts = tuple(one_for_each(listed or [1], len(sizes)))
    if len(counts) != len(sizes):
        rule = f"has {len(counts)} numbers, and there are {len(sizes)} instances"
        _refuse("nodes_per_instance", listed, rule, f"write one number for all instances, or {len(sizes)}")
    for count, size in zip(counts, sizes, strict=True):
        if count != 1 and rollout.name != "vllm":
            rule = f"has {count}, and the {rollout.name} engine is one process"
            _refuse("nodes_per_instance", listed, rule, "set gen_actor_rollout_ref.rollout.name=vllm, or leave it out")
        if count != 1 and rollout.data_parallel_size > 1:
            rule = f"has {count}, and {DATA}={rollout.data_parallel_size} copies of the model need no instance over several nodes"
            _refuse("nodes_per_instance", listed, rule, f"set {DATA}=1 and {KEY}.num_instances higher")
        if count < 1 or size % count:
            rule = f"has {count}, over which {size} workers of an instance (tensor x pipeline parallel size) do not divide"
            _refuse("nodes_per_instance", listed, rule, f"write divisors of {size}")
    return counts


def check_on_cpus(config: Config) -> None:
    """Of instances on CPUs.

    Raises:
        ConfigError: One that spans nodes has several workers on each.
    """
    for count, size in zip(instance_nodes(config), instance_sizes(config), strict=True):
        if 1 < count < size:
            rule = f"has {count} for {size} workers, and vLLM's CPU build cannot start an instance with more than one on each of its nodes"
            _refuse("nodes_per_instance", config.psrl.deployment.nodes_per_instance, rule, f"write {size}, or use GPUs")


def _check_nodes(config: Config) -> None:
    deployment = config.psrl.deployment
    lists = {name: vars(deployment)[name] for name in LISTS_OF_NODES}
    if deployment.num_nodes == 0:
        return refuse_dead(config, [f"{KEY}.{name}" for name in lists], because=f"{KEY}.num_nodes=0", fix=f"set {KEY}.num_nodes")
    if deployment.num_nodes > 1 and config.psrl.ray_address == LOCAL:
        rule = "is more than this machine, on which psrl.ray_address=local starts Ray"
        _refuse("num_nodes", deployment.num_nodes, rule, "set psrl.ray_address=auto")
    for name, values in lists.items():
        if not values and name not in LISTS_OF_GPUS:
            _refuse(name, values, f"must be said of the nodes that {KEY}.num_nodes describes", f"set {KEY}.{name}=[64]")
        if values and len(values) not in (1, deployment.num_nodes):
            rule = f"has {len(values)} numbers, and there are {deployment.num_nodes} nodes"
            _refuse(name, values, rule, f"write one number for all nodes, or {deployment.num_nodes}")
        if any(value < (0 if name == "gpus_per_node" else 1) for value in values):
            _refuse(name, values, "has a number below its least", "write whole numbers")


def _refuse(name: str, value: object, rule: str, fix: str) -> None:
    raise ConfigError(key=f"{KEY}.{name}", value=value, rule=rule, fix=fix)
