"""What engine replicas and the parameter server hold."""

from __future__ import annotations

from psrl.config.deployment_checks import instance_nodes
from psrl.config.machine import Machine
from psrl.config.model_size import DTYPE_BYTES, ModelSize, kv_cache_bytes
from psrl.config.planned_process import MIB, PROCESS_BYTES, PlannedProcess, threads_of
from psrl.config.rollout import RolloutConfig
from psrl.config.tree import Config

WEIGHT_VERSIONS_KEPT = 2
"""Of `runtime.parameter_server`; a test holds the two equal."""
PARAMETERS_PER_THREAD = 4_000_000
"""Of the torch engine. At two threads a model of 0.9M parameters was seen to decode 0.4 to 0.9 times as fast as at one, one of 5M 0.6 (one
sequence) to 1.25 times (64), one of 27M 0.8 to 1.4 times; and agent workers and sandboxes want the other cores."""


def engine_replicas(config: Config, machine: Machine, size: ModelSize) -> PlannedProcess:
    """The servers that generate, training and validation together; one that spans nodes counts once on each, with its share of the work."""
    rollout, num_nodes = config.gen_actor_rollout_ref.rollout, instance_nodes(config)
    count = sum(num_nodes) + num_nodes[0] * config.psrl.deployment.num_validation_instances
    num_computing = rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size * rollout.data_parallel_size
    num_computing = max(1, num_computing // min(num_nodes))
    if rollout.name == "scripted":
        memory, reason = PROCESS_BYTES["plain"], "answers from a script"
    else:
        memory, reason = _engine_memory(config, size, num_computing, min(num_nodes))
    return PlannedProcess(
        role=f"{rollout.name} engine",
        count=count,
        num_cores=engine_threads(rollout, size, threads_of(0, machine, count * num_computing)) * num_computing,
        memory_bytes=memory,
        reason=reason,
        key="gen_actor_rollout_ref.rollout.max_num_seqs",
    )


def engine_threads(rollout: RolloutConfig, size: ModelSize, share: int) -> int:
    """What a process of a replica computes with that may have `share` cores; the kernels of a small model are too short to be divided."""
    wanted = max(1, size.num_parameters // PARAMETERS_PER_THREAD) if rollout.name == "torch" else share
    return rollout.num_threads or min(share, wanted)


def _engine_memory(config: Config, size: ModelSize, num_computing: int, num_nodes: int) -> tuple[int, str]:
    """Of a replica that computes, on a CPU and on one of its nodes, and what most of it is for."""
    rollout, val = config.gen_actor_rollout_ref.rollout, config.train_actor_rollout_ref.rollout
    dtype = config.train_actor_rollout_ref.model.served_dtype
    longest = max(each.prompt_length + each.response_length for each in (rollout, val))
    # vLLM has room for as many ended turns as run at once; the torch engine plans with what running ones fill.
    num_slots = rollout.max_num_seqs * (2 if rollout.name == "vllm" else 1)
    cache = kv_cache_bytes(size, num_slots=num_slots, num_tokens=longest, dtype=dtype) * rollout.data_parallel_size // num_nodes
    weights = 2 * size.num_parameters * DTYPE_BYTES[dtype] * rollout.data_parallel_size // num_nodes
    logits = rollout.max_num_seqs * size.vocab_size * 4 * 3
    reason = f"weights twice while they are read from the disk {weights / MIB:.0f} MiB; KV cache {cache / MIB:.0f} MiB"
    processes = PROCESS_BYTES["torch"]
    if rollout.name == "vllm":
        processes = PROCESS_BYTES["vllm"] * (1 + num_computing)  # its server, and vLLM's own
    return processes + cache + weights + logits, reason


def parameter_server(config: Config, size: ModelSize, *, with_training: bool) -> PlannedProcess:
    """Its actor, and the weights that trainer and replicas of a node share."""
    versions = weight_versions_at_once(config) if with_training else 0
    shared = versions * size.num_parameters * DTYPE_BYTES[config.train_actor_rollout_ref.model.served_dtype]
    return PlannedProcess(
        role="parameter server",
        count=1,
        num_cores=0,
        memory_bytes=PROCESS_BYTES["plain"] + shared,
        reason=f"{versions} versions of the weights in shared memory {shared / MIB:.0f} MiB",
        key="train_actor_rollout_ref.model.path",
    )


def weight_versions_at_once(config: Config) -> int:
    """Most versions in the memory that trainer and replicas share: those kept, one that is written, older ones that replicas serve.

    Example:
        staleness 3 and 8 replicas, 7 being written: 6 and 5 are kept, 4 and 3 may still be served: 5 versions.
    """
    served = min(config.gen_actor_rollout_ref.rollout.num_replicas, max(0, config.psrl.staleness - 1))
    return WEIGHT_VERSIONS_KEPT + 1 + served
