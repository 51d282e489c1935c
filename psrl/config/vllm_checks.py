"""What only the `vllm` engine reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from psrl.config.fields import leaves_of, value_at
from psrl.config.rollout import RolloutConfig
from psrl.errors import ConfigError

if TYPE_CHECKING:
    from psrl.config.tree import Config

VLLM_KEYS = (
    "engine_python",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
    "gpu_memory_utilization",
    "enforce_eager",
    "max_num_batched_tokens",
    "enable_prefix_caching",
)
"""Of `rollout`; training and validation share engines, so each is one value for both."""
LEAST_TEMPERATURE = 0.01
"""vLLM samples at this one where less is asked for, and warns in its log; 0 is greedy."""
DEFAULTS = {leaf.key: leaf.default for leaf in leaves_of(RolloutConfig)}


def check_vllm(config: Config) -> None:
    """Settings of `vllm` without `vllm`, and ones that vLLM cannot work with.

    Raises:
        ConfigError: The first broken rule.
    """
    key, rollout = "gen_actor_rollout_ref.rollout", config.gen_actor_rollout_ref.rollout
    if rollout.name != "vllm":
        for name in VLLM_KEYS:
            value = value_at(config, f"{key}.{name}")
            if value != DEFAULTS[name]:
                rule, fix = f"has no effect while {key}.name={rollout.name}", f"set {key}.name=vllm, or leave {key}.{name} out"
                raise ConfigError(key=f"{key}.{name}", value=value, rule=rule, fix=fix)
        return
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        rule = f"is less than one token for each of {key}.max_num_seqs={rollout.max_num_seqs}"
        fix = f"set {key}.max_num_batched_tokens={rollout.max_num_seqs} or more"
        raise ConfigError(key=f"{key}.max_num_batched_tokens", value=rollout.max_num_batched_tokens, rule=rule, fix=fix)
    for side in ("gen_actor_rollout_ref", "train_actor_rollout_ref"):
        temperature = value_at(config, f"{side}.rollout.temperature")
        if 0 < temperature < LEAST_TEMPERATURE:
            rule, fix = f"vLLM would sample at {LEAST_TEMPERATURE} instead", f"set 0 (greedy), or {LEAST_TEMPERATURE} or more"
            raise ConfigError(key=f"{side}.rollout.temperature", value=temperature, rule=rule, fix=fix)
