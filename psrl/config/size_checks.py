"""How the trainer holds a model (sharding, numbers, offload, adapters): what cannot work together, or has no effect."""

from __future__ import annotations

from collections.abc import Sequence

from psrl.config.fields import leaves_of, value_at
from psrl.config.model import ALL_LINEAR
from psrl.config.tree import Config
from psrl.errors import ConfigError

MODEL = "train_actor_rollout_ref.model"
ACTOR = "train_actor_rollout_ref.actor"
FSDP = f"{ACTOR}.fsdp_config"
_DEFAULTS = {leaf.key: leaf.default for leaf in leaves_of(Config)}


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
        _refuse_dead(config, keys, because=f"{key}=false", fix=f"set {key}=true")


def is_sharded(config: Config) -> bool:
    """Whether FSDP2 holds the model: with several ranks, and for what it alone can do with one."""
    model, fsdp = config.train_actor_rollout_ref.model, config.train_actor_rollout_ref.actor.fsdp_config
    return config.trainer.num_workers > 1 or model.served_dtype != model.dtype or fsdp.offload_policy


def _check_numbers(config: Config) -> None:
    model, key = config.train_actor_rollout_ref.model, f"{MODEL}.compute_dtype"
    if model.compute_dtype == model.dtype:
        raise ConfigError(key=key, value=model.compute_dtype, rule=f"has no effect: {MODEL}.dtype is the same", fix=f"leave {key} out")
    if model.compute_dtype == "float32":
        rule = f"computes in more digits than {MODEL}.dtype={model.dtype} keeps"
        raise ConfigError(key=key, value="float32", rule=rule, fix=f"set {MODEL}.dtype=float32 and leave {key} out")
    if config.trainer.export_dtype == model.dtype:
        key = "trainer.export_dtype"
        raise ConfigError(key=key, value=model.dtype, rule=f"has no effect: {MODEL}.dtype is the same", fix=f"leave {key} out")


def _check_sharding(config: Config) -> None:
    ranks, size, key = config.trainer.num_workers, config.train_actor_rollout_ref.actor.fsdp_config.fsdp_size, f"{FSDP}.fsdp_size"
    if not is_sharded(config):
        _refuse_dead(config, [key, f"{FSDP}.reshard_after_forward"], because="trainer.num_workers=1", fix="set trainer.num_workers")
    elif size == 0 or (size > 0 and ranks % size):
        divisors = [count for count in range(1, ranks + 1) if ranks % count == 0]
        rule = f"does not divide trainer.num_workers={ranks}"
        raise ConfigError(key=key, value=size, rule=rule, fix=f"set {key}=-1 (all), or one of {divisors}")
    elif size == ranks:
        raise ConfigError(key=key, value=size, rule="has no effect: these are all ranks", fix=f"leave {key} out")


def _check_offload(config: Config) -> None:
    fsdp = config.train_actor_rollout_ref.actor.fsdp_config
    if config.trainer.device == "cpu":
        keys = [f"{FSDP}.offload_policy", f"{FSDP}.optimizer_offload"]
        _refuse_dead(config, keys, because="trainer.device=cpu", fix="set trainer.device=cuda")
    if fsdp.offload_policy and fsdp.optimizer_offload:
        key = f"{FSDP}.optimizer_offload"
        rule = f"has no effect while {FSDP}.offload_policy=true, which holds the optimizer too"
        raise ConfigError(key=key, value=True, rule=rule, fix=f"leave {key} out")


def _check_adapter(config: Config) -> None:
    model, key = config.train_actor_rollout_ref.model, f"{MODEL}.target_modules"
    if model.lora_rank == 0:
        _refuse_dead(
            config, [f"{MODEL}.lora_alpha", f"{MODEL}.lora_merge", key], because=f"{MODEL}.lora_rank=0", fix=f"set {MODEL}.lora_rank=16"
        )
    elif not model.target_modules:
        rule = "no layer would have an adapter"
        raise ConfigError(key=key, value=[], rule=rule, fix=f"set {key}=[{ALL_LINEAR}] or names such as [q_proj,v_proj]")
    elif ALL_LINEAR in model.target_modules and len(model.target_modules) > 1:
        rule = f"{ALL_LINEAR} is all of them; other names have no effect"
        raise ConfigError(key=key, value=model.target_modules, rule=rule, fix=f"set {key}=[{ALL_LINEAR}]")


def _refuse_dead(config: Config, keys: Sequence[str], *, because: str, fix: str) -> None:
    for key in keys:
        value = value_at(config, key)
        if value != _DEFAULTS[key]:
            raise ConfigError(key=key, value=value, rule=f"has no effect while {because}", fix=f"{fix}, or leave {key} out")
