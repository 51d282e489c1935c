"""What train workers and fine-tuning hold."""

from __future__ import annotations

from psrl.config.machine import Machine
from psrl.config.model_size import DTYPE_BYTES, ModelSize, read_model_size
from psrl.config.planned_process import MIB, PROCESS_BYTES, PlannedProcess, threads_of
from psrl.config.tree import Config

SFT_MICRO_BATCH_TOKENS = 16384
"""Of `training.sft`; a test holds the two equal."""


def train_workers(config: Config, machine: Machine, size: ModelSize) -> PlannedProcess:
    """The ranks of a training run."""
    actor, count = config.train_actor_rollout_ref.actor, config.trainer.num_workers
    dtype_bytes = DTYPE_BYTES[config.train_actor_rollout_ref.model.dtype]
    # Weights, gradients and AdamW's two moments, divided among the ranks; a copy of the weights to export.
    states = size.num_parameters * dtype_bytes * 4 // count + size.num_parameters * dtype_bytes
    if actor.use_kl_loss:
        states += size.num_parameters * dtype_bytes // count
    if config.algorithm.adv_estimator == "gae":
        critic = read_model_size(config.critic.model.path) if config.critic.model.path else size
        states += critic.num_parameters * dtype_bytes * 4 // count
    rollout = config.gen_actor_rollout_ref.rollout
    rows = config.data.train_batch_size * config.psrl.rollout_n
    tokens = min(actor.ppo_max_token_len_per_gpu, rows * (rollout.prompt_length + rollout.response_length))
    kept = _activation_bytes(size, tokens, dtype_bytes, is_checkpointed=actor.gradient_checkpointing)
    return PlannedProcess(
        role="train worker",
        count=count,
        num_cores=threads_of(actor.num_threads, machine, count),
        memory_bytes=PROCESS_BYTES["torch"] + states + kept,
        reason=f"weights, gradients, AdamW {states / MIB:.0f} MiB; activations of {tokens} tokens {kept / MIB:.0f} MiB",
        key="train_actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    )


def fine_tuning(config: Config) -> PlannedProcess:
    """The one process of supervised fine-tuning."""
    size, sft = read_model_size(config.train_actor_rollout_ref.model.path), config.sft
    dtype_bytes = DTYPE_BYTES[config.train_actor_rollout_ref.model.dtype]
    # Weights, gradients and AdamW's two moments; a copy of the weights to save.
    states = size.num_parameters * dtype_bytes * 5
    tokens = min(max(SFT_MICRO_BATCH_TOKENS, sft.max_length), sft.batch_size * sft.max_length)
    kept = _activation_bytes(size, tokens, dtype_bytes)
    return PlannedProcess(
        role="fine-tuning",
        count=1,
        num_cores=0,
        memory_bytes=PROCESS_BYTES["torch"] + states + kept,
        reason=f"weights, gradients, AdamW {states / MIB:.0f} MiB; activations of {tokens} tokens {kept / MIB:.0f} MiB",
        key="sft.batch_size" if kept > states else "train_actor_rollout_ref.model.path",
    )


def _activation_bytes(size: ModelSize, num_tokens: int, dtype_bytes: int, *, is_checkpointed: bool = False) -> int:
    # Per token and layer a training forward keeps about 16 hidden widths (attention, MLP of four widths, norms); checkpointing keeps one.
    return num_tokens * size.hidden_size * (size.num_layers * (1 if is_checkpointed else 16) + 16) * dtype_bytes
