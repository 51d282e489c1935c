"""What processes hold on GPUs instead of in their node's memory, and whether the cards have it."""

from __future__ import annotations

from dataclasses import replace

from psrl.config.machine import Machine
from psrl.config.model_size import DTYPE_BYTES, ModelSize
from psrl.config.placement import Placement
from psrl.config.planned_process import PROCESS_BYTES, PlannedProcess
from psrl.config.tree import Config
from psrl.errors import ConfigError

GIB = 2**30
CARD_SHARE = 0.95
"""Of a card's memory; the rest is the driver's, the libraries' and lost between blocks."""
UTILIZATION = "gen_actor_rollout_ref.rollout.gpu_memory_utilization"
STAGING_BYTES = 128 * 2**20
"""Buffers of `transports.nccl` on each side; a test holds the two equal."""
NCCL_BYTES = 256 * 2**20
"""What NCCL holds for a group of two. An estimate: no GPU was at hand."""
CUDA_CONTEXT_BYTES = 512 * 2**20
"""Of a process on a card. An estimate, too."""
BROUGHT = "weights"
"""Role of what holds versions that were brought to a node."""
TOKENS = "train_actor_rollout_ref.actor.ppo_max_token_len_per_gpu"


def engines_on_cards(row: PlannedProcess, config: Config, machine: Machine, size: ModelSize) -> PlannedProcess:
    """The row of the replicas. vLLM takes the share of its cards that it is given, and fills it with keys."""
    rollout = config.gen_actor_rollout_ref.rollout
    if rollout.name == "scripted" or not machine.has_gpu_for(rollout.device):
        return row
    if rollout.name != "vllm":
        held = row.memory_bytes - PROCESS_BYTES["torch"]
        return replace(row, memory_bytes=PROCESS_BYTES["torch"], gpu_bytes=held, reason=f"on its GPU: {row.reason}")
    share = int(machine.gpu_bytes * rollout.gpu_memory_utilization)
    weights = size.num_parameters * DTYPE_BYTES[config.train_actor_rollout_ref.model.served_dtype] // tensor_shards(config)
    reason = f"on each of its GPUs {rollout.gpu_memory_utilization:.0%} of the card: weights {weights / GIB:.1f} GiB, else keys"
    return replace(row, memory_bytes=PROCESS_BYTES["torch"], gpu_bytes=max(share, weights), reason=reason)


def tensor_shards(config: Config) -> int:
    """Cards over which the smallest instance spreads one copy of the weights."""
    rollout, listed = config.gen_actor_rollout_ref.rollout, config.psrl.deployment.gpus_per_instance
    if listed:
        return max(1, min(listed) // rollout.data_parallel_size)
    return rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size


def check_cards(config: Config, rows: tuple[PlannedProcess, ...], machine: Machine, placement: Placement) -> None:
    """Whether one card holds what is planned for it.

    Raises:
        ConfigError: It does not; with what is on it.
    """
    if not machine.gpu_bytes:
        return
    rollout, available = config.gen_actor_rollout_ref.rollout, int(machine.gpu_bytes * CARD_SHARE)
    on_cards = {row.role: row for row in rows if row.gpu_bytes and row.count}
    trained = on_cards.get("train worker")
    engine = on_cards.get(f"{rollout.name} engine")
    if engine is not None and rollout.name == "vllm" and engine.gpu_bytes > machine.gpu_bytes * rollout.gpu_memory_utilization:
        rule = f"of {machine.gpu_bytes / GIB:.0f} GiB is less than the weights of an instance take of each of its GPUs ({engine.reason})"
        fix = f"raise {UTILIZATION}, or give an instance more GPUs"
        raise ConfigError(key=UTILIZATION, value=rollout.gpu_memory_utilization, rule=rule, fix=fix)
    brought = on_cards.pop(BROUGHT, None)
    if engine is not None and brought is not None and engine.gpu_bytes + brought.gpu_bytes > available:
        rule = (
            f"needs {brought.gpu_bytes / GIB:.1f} GiB beside {engine.role} ({engine.reason}) on a card of {machine.gpu_bytes / GIB:.0f} GiB"
        )
        fix = "set psrl.ps_mode=cpu_ref" + (f", or lower {UTILIZATION}" if rollout.name == "vllm" else "")
        raise ConfigError(key="psrl.ps_mode", value=config.psrl.ps_mode, rule=rule, fix=fix)
    held = sum(row.gpu_bytes for row in (trained, engine, brought) if row is not None) if placement.shares_gpus else 0
    held = max([held, *(row.gpu_bytes for row in on_cards.values() if row.role == "train worker" or rollout.name != "vllm")])
    if held > available:
        what = " and ".join(f"{row.role} ({row.gpu_bytes / GIB:.1f} GiB, {row.reason})" for row in (trained, engine) if row is not None)
        rule = f"{what} do not fit on a card of {machine.gpu_bytes / GIB:.0f} GiB"
        fix = f"raise trainer.num_workers, lower {TOKENS}" + (f" or {UTILIZATION}" if placement.shares_gpus else "")
        raise ConfigError(key="trainer.num_workers", value=config.trainer.num_workers, rule=rule, fix=fix)
