"""How the trainer holds a model (sharding, numbers, offload, adapters): what cannot work together, or has no effect."""

from __future__ import annotations

from psrl.config.model import ALL_LINEAR
from psrl.config.refusals import refuse, refuse_dead
from psrl.config.tree import Config

MODEL = "train_actor_rollout_ref.model"
ACTOR = "train_actor_rollout_ref.actor"
FSDP = f"{ACTOR}.fsdp_config"


def check_size(config: Config) -> None:
    """Sharding, numbers, offload and adapters.

    Raises:
        ConfigError: The first broken rule.
    """
    _check_numbers(config)
    _check_sharding(config)
    _check_offload(config)
    _check_adapter(config)
    if not config.train_actor_rollout_ref.actor.use_remove_padding:
        keys, key = [f"{ACTOR}.use_prefix_grouper"], f"{ACTOR}.use_remove_padding"
        refuse_dead(config, keys, because=f"{key}=false", fix=f"set {key}=true")


def is_sharded(config: Config) -> bool:
    """Whether FSDP2 holds the model."""
    trained = config.train_actor_rollout_ref
    return trained.actor.fsdp_config.holds(trained.model, num_ranks=config.trainer.num_workers)


def _check_numbers(config: Config) -> None:
    model, key = config.train_actor_rollout_ref.model, f"{MODEL}.compute_dtype"
    if model.compute_dtype == model.dtype:
        refuse(config, key, f"has no effect: {MODEL}.dtype is the same", f"leave {key} out")
    if model.compute_dtype == "float32":
        rule = f"computes in more digits than {MODEL}.dtype={model.dtype} keeps"
        refuse(config, key, rule, f"set {MODEL}.dtype=float32 and leave {key} out")
    if config.trainer.export_dtype == model.dtype:
        key = "trainer.export_dtype"
        refuse(config, key, f"has no effect: {MODEL}.dtype is the same", f"leave {key} out")


def _check_sharding(config: Config) -> None:
    ranks, size, key = config.trainer.num_workers, config.train_actor_rollout_ref.actor.fsdp_config.fsdp_size, f"{FSDP}.fsdp_size"
    if not is_sharded(config):
        refuse_dead(config, [key, f"{FSDP}.reshard_after_forward"], because="trainer.num_workers=1", fix="set trainer.num_workers")
    elif size == 0 or (size > 0 and ranks % size):
        divisors = [count for count in range(1, ranks + 1) if ranks % count == 0]
        refuse(config, key, f"does not divide trainer.num_workers={ranks}", f"set {key}=-1 (all), or one of {divisors}")
    elif size == ranks:
        refuse(config, key, "has no effect: these are all ranks", f"leave {key} out")


def _check_offload(config: Config) -> None:
    fsdp = config.train_actor_rollout_ref.actor.fsdp_config
    if config.trainer.device == "cpu":
        keys = [f"{FSDP}.offload_policy", f"{FSDP}.optimizer_offload"]
        refuse_dead(config, keys, because="trainer.device=cpu", fix="set trainer.device=cuda")
    if fsdp.offload_policy and fsdp.optimizer_offload:
        key = f"{FSDP}.optimizer_offload"
        refuse(config, key, f"has no effect while {FSDP}.offload_policy=true, which holds the optimizer too", f"leave {key} out")


def _check_adapter(config: Config) -> None:
    model, key = config.train_actor_rollout_ref.model, f"{MODEL}.target_modules"
    if model.lora_rank == 0:
        refuse_dead(
            config, [f"{MODEL}.lora_alpha", f"{MODEL}.lora_merge", key], because=f"{MODEL}.lora_rank=0", fix=f"set {MODEL}.lora_rank=16"
        )
    elif not model.target_modules:
        refuse(config, key, "no layer would have an adapter", f"set {key}=[{ALL_LINEAR}] or names such as [q_proj,v_proj]")
    elif ALL_LINEAR in model.target_modules and len(model.target_modules) > 1:
        refuse(config, key, f"{ALL_LINEAR} is all of them; other names have no effect", f"set {key}=[{ALL_LINEAR}]")
