"""Bounds and choices of single settings, one row each.

Choices that are names in a registry (losses, parsers, environments, ...) are not here: registries live in higher layers, which
pass their names to `cross_checks.check_names`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from psrl.config.fields import leaves_of, value_at
from psrl.config.tree import Config
from psrl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Bounds:
    """An interval; `above` excludes its end, `at_least` and `at_most` include it."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None

    def hold(self, value: float) -> bool:
        """Whether value lies inside; nan and infinity never do."""
        return (
            math.isfinite(value)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
        )

    def __str__(self) -> str:
        parts = [("at least", self.at_least), ("above", self.above), ("at most", self.at_most)]
        return " and ".join(f"{words} {number:g}" for words, number in parts if number is not None)


POSITIVE = Bounds(above=0)
NOT_NEGATIVE = Bounds(at_least=0)
COUNT = Bounds(at_least=1)
SHARE = Bounds(at_least=0, at_most=1)
SECONDS = Bounds(above=0, at_most=30 * 86400)

_ROLLOUT_BOUNDS = {
    "num_replicas": COUNT,
    "n": COUNT,
    "temperature": NOT_NEGATIVE,
    "top_p": Bounds(above=0, at_most=1),
    "top_k": NOT_NEGATIVE,
    "prompt_length": COUNT,
    "response_length": COUNT,
    "max_num_seqs": COUNT,
    "num_threads": NOT_NEGATIVE,
    "tensor_model_parallel_size": COUNT,
    "pipeline_model_parallel_size": COUNT,
    "data_parallel_size": COUNT,
    "gpu_memory_utilization": Bounds(above=0, at_most=1),
    "max_num_batched_tokens": COUNT,
    "request_timeout_s": SECONDS,
    "startup_timeout_s": SECONDS,
    "multi_turn.max_turns": COUNT,
    "multi_turn.max_calls_per_turn": COUNT,
    "multi_turn.max_tool_response_length": COUNT,
    "multi_turn.max_tokens_per_turn": NOT_NEGATIVE,
    "agent.num_workers": COUNT,
    "agent.max_concurrent_episodes": COUNT,
    "agent.episode_timeout_s": SECONDS,
    "agent.step_timeout_s": SECONDS,
}
_ROLLOUT_CHOICES = {"name": ("torch", "vllm", "scripted"), "device": ("auto", "cpu", "cuda"), "agent.branch_reward": ("shared", "last")}
ROLLOUTS = ("gen_actor_rollout_ref.rollout", "train_actor_rollout_ref.rollout")

_ACTOR = "train_actor_rollout_ref.actor"
_OPTIM_BOUNDS = {
    "lr": POSITIVE,
    "weight_decay": NOT_NEGATIVE,
    "beta1": Bounds(at_least=0, at_most=0.999999),
    "beta2": Bounds(at_least=0, at_most=0.999999),
    "eps": POSITIVE,
    "lr_warmup_steps": NOT_NEGATIVE,
    "min_lr_ratio": SHARE,
}
BOUNDS: dict[str, Bounds] = {
    **{f"{rollout}.{key}": bounds for rollout in ROLLOUTS for key, bounds in _ROLLOUT_BOUNDS.items()},
    **{f"{section}.optim.{key}": bounds for section in (_ACTOR, "critic") for key, bounds in _OPTIM_BOUNDS.items()},
    f"{_ACTOR}.clip_ratio_low": Bounds(above=0, at_most=1),
    f"{_ACTOR}.clip_ratio_high": POSITIVE,
    f"{_ACTOR}.clip_ratio_c": Bounds(above=1),
    f"{_ACTOR}.entropy_coeff": NOT_NEGATIVE,
    f"{_ACTOR}.kl_loss_coef": NOT_NEGATIVE,
    f"{_ACTOR}.ppo_epochs": COUNT,
    f"{_ACTOR}.ppo_mini_batch_size": NOT_NEGATIVE,
    f"{_ACTOR}.ppo_max_token_len_per_gpu": COUNT,
    f"{_ACTOR}.grad_clip": POSITIVE,
    f"{_ACTOR}.num_threads": NOT_NEGATIVE,
    f"{_ACTOR}.loss_scale_factor": NOT_NEGATIVE,
    f"{_ACTOR}.fsdp_config.fsdp_size": Bounds(at_least=-1),
    "train_actor_rollout_ref.model.lora_rank": NOT_NEGATIVE,
    "train_actor_rollout_ref.model.lora_alpha": POSITIVE,
    "data.generator.num_train": COUNT,
    "data.generator.num_val": NOT_NEGATIVE,
    "data.generator.seed": NOT_NEGATIVE,
    "data.train_batch_size": COUNT,
    "data.train_max_samples": NOT_NEGATIVE,
    "data.val_max_samples": NOT_NEGATIVE,
    "data.max_prompt_length": COUNT,
    "data.max_bad_rows": NOT_NEGATIVE,
    "data.seed": NOT_NEGATIVE,
    "reward.num_processes": COUNT,
    "reward.timeout_s": SECONDS,
    "reward.execution.timeout_s": SECONDS,
    "reward.execution.max_patch_kb": Bounds(at_least=1, at_most=2048),
    "reward.execution.cache_size": NOT_NEGATIVE,
    "reward.execution.memory_mb": COUNT,
    "reward.execution.num_processes": COUNT,
    "reward.execution.disk_mb": COUNT,
    "reward.overlong_buffer.len": COUNT,
    "reward.overlong_buffer.penalty_factor": POSITIVE,
    "reward.overlong_buffer.max_sampled_tokens": COUNT,
    "algorithm.gamma": SHARE,
    "algorithm.lam": SHARE,
    "algorithm.kl_ctrl.kl_coef": POSITIVE,
    "critic.cliprange_value": POSITIVE,
    "critic.grad_clip": POSITIVE,
    "critic.ppo_epochs": NOT_NEGATIVE,
    "trainer.critic_warmup": NOT_NEGATIVE,
    "algorithm.filter_groups.max_num_gen_batches": COUNT,
    # Ratios are held above exp(-20) = 2e-9: a smaller threshold is never reached.
    "algorithm.rollout_correction.rollout_token_veto_threshold": Bounds(at_least=1e-8, at_most=0.5),
    "psrl.staleness": NOT_NEGATIVE,
    "psrl.deployment.num_instances": NOT_NEGATIVE,
    "psrl.deployment.num_validation_instances": NOT_NEGATIVE,
    "psrl.deployment.num_nodes": NOT_NEGATIVE,
    "psrl.rollout_n": COUNT,
    "psrl.redundant_episodes": NOT_NEGATIVE,
    "psrl.redundant_groups": NOT_NEGATIVE,
    "psrl.max_reissues": NOT_NEGATIVE,
    "psrl.max_groups_in_flight": NOT_NEGATIVE,
    "psrl.sync.request_num": NOT_NEGATIVE,
    "psrl.sync.throughput": Bounds(above=0, at_most=1),
    "psrl.sync.kv_cache": SHARE,
    "psrl.proactive_filter.time_limit_s": SECONDS,
    "psrl.proactive_filter.max_per_step": COUNT,
    "psrl.restarts.max_restarts": NOT_NEGATIVE,
    "psrl.restarts.window_s": SECONDS,
    "psrl.deadlines.stall_s": SECONDS,
    "psrl.max_episode_retries": NOT_NEGATIVE,
    "psrl.min_group_size": COUNT,
    "psrl.max_infra_error_rate": SHARE,
    "psrl.rollout_gateway.session_idle_timeout_s": SECONDS,
    "psrl.rollout_gateway.max_sessions": COUNT,
    "psrl.rollout_gateway.retry_for_s": Bounds(at_least=0, at_most=3600),
    "psrl.rollout_gateway.max_restarts": NOT_NEGATIVE,
    "psrl.rollout_gateway.restart_window_s": SECONDS,
    "psrl.deadlines.startup_s": SECONDS,
    "psrl.deadlines.train_step_s": SECONDS,
    "psrl.deadlines.weight_sync_s": SECONDS,
    "psrl.deadlines.data_plane_s": SECONDS,
    "psrl.deadlines.shutdown_s": SECONDS,
    "trainer.total_training_steps": COUNT,
    "trainer.test_freq": NOT_NEGATIVE,
    "trainer.save_freq": NOT_NEGATIVE,
    "trainer.max_ckpt_to_keep": COUNT,
    "trainer.num_workers": COUNT,
    "trainer.seed": NOT_NEGATIVE,
    "trainer.trajectories_per_step": NOT_NEGATIVE,
    "transfer_queue.num_data_storage_units": COUNT,
    "transfer_queue.total_storage_size": COUNT,
    "sandbox.num_workers": COUNT,
    "sandbox.max_starts": COUNT,
    "sandbox.cpus": NOT_NEGATIVE,
    "sandbox.pull_timeout_s": SECONDS,
    "sandbox.wall_s": SECONDS,
    "sandbox.max_queue_s": SECONDS,
    "sandbox.cpu_s": SECONDS,
    "sandbox.memory_mb": Bounds(at_least=32),
    "sandbox.num_processes": COUNT,
    "sandbox.output_kb": COUNT,
    "sandbox.disk_mb": COUNT,
    "sft.num_steps": COUNT,
    "sft.batch_size": COUNT,
    "sft.max_length": COUNT,
    "sft.lr": POSITIVE,
    "sft.min_lr_ratio": SHARE,
    "sft.warmup_steps": NOT_NEGATIVE,
    "sft.weight_decay": NOT_NEGATIVE,
    "sft.beta2": Bounds(at_least=0, at_most=0.999999),
    "sft.grad_clip": POSITIVE,
    "sft.seed": NOT_NEGATIVE,
}

CHOICES: dict[str, tuple[str, ...]] = {
    **{f"{rollout}.{key}": choices for rollout in ROLLOUTS for key, choices in _ROLLOUT_CHOICES.items()},
    **{f"{section}.optim.lr_scheduler_type": ("constant", "linear", "cosine") for section in (_ACTOR, "critic")},
    f"{_ACTOR}.loss_agg_mode": ("token_mean", "seq_mean", "seq_sum", "turn_mean"),
    "algorithm.kl_penalty": ("k1", "k2", "k3"),
    f"{_ACTOR}.kl_loss_type": ("k1", "k2", "k3", "k1+", "k3+"),
    f"{_ACTOR}.old_logprobs": ("rollout", "recompute"),
    "train_actor_rollout_ref.model.dtype": ("float32", "bfloat16"),
    "train_actor_rollout_ref.model.compute_dtype": ("float32", "bfloat16"),
    "trainer.export_dtype": ("float32", "bfloat16"),
    "train_actor_rollout_ref.model.history_thinking": ("keep", "strip"),
    "reward.execution.mode": ("binary", "test_ratio", "partial_credit", "shaped"),
    "psrl.deployment.share_gpus": ("never", "auto", "always"),
    "psrl.ps_mode": ("cpu_ref", "nixl_cpu", "nccl"),
    "psrl.incomplete_groups": ("drop", "allow_partial"),
    "psrl.sync.policy": ("eager", "request_num", "throughput", "kv_cache", "starvation"),
    "psrl.routing.policy": ("random", "round_robin", "request_num_balance", "cache_aware"),
    "psrl.routing.sticky": ("group", "trajectory"),
    "psrl.proactive_filter.action": ("none", "retry", "truncate", "null"),
    "psrl.rollout_gateway.agent_sampling": ("override", "refuse"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "sandbox.backend": ("bubblewrap", "docker", "sandbox_fusion", "process"),
}


def check_values(config: Config) -> None:
    """Every setting by itself.

    Raises:
        ConfigError: The first one that is out of its bounds or choices.
    """
    for leaf in leaves_of(Config):
        key, value = leaf.key, value_at(config, leaf.key)
        if key in CHOICES and value is not None and value not in CHOICES[key]:
            raise ConfigError(key=key, value=value, rule="is no choice", fix=f"set {key} to one of {', '.join(CHOICES[key])}")
        if key in BOUNDS and value is not None and not BOUNDS[key].hold(value):
            fix = f"set {key}={_inside(BOUNDS[key], leaf.default)}"
            raise ConfigError(key=key, value=value, rule=f"must be {BOUNDS[key]}", fix=fix)


def _inside(bounds: Bounds, default: float | None) -> float:
    """A value to propose: the default where it is legal."""
    if default is not None and bounds.hold(default):
        return default
    assert bounds.at_least is not None, f"{bounds} has no legal default and no lower end"
    return bounds.at_least
