"""What only the `vllm` engine reads."""

from __future__ import annotations

from psrl.config.fields import value_at
from psrl.config.refusals import refuse, refuse_dead
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


def check_vllm(config: Config) -> None:
    """Settings of `vllm` without `vllm`, and ones that vLLM cannot work with.

    Raises:
        ConfigError: The first broken rule.
    """
    key, rollout = "gen_actor_rollout_ref.rollout", config.gen_actor_rollout_ref.rollout
    if rollout.name != "vllm":
        keys = [f"{key}.{name}" for name in VLLM_KEYS]
        return refuse_dead(config, keys, because=f"{key}.name={rollout.name}", fix=f"set {key}.name=vllm")
    if rollout.max_num_batched_tokens < rollout.max_num_seqs:
        rule = f"is less than one token for each of {key}.max_num_seqs={rollout.max_num_seqs}"
        fix = f"set {key}.max_num_batched_tokens={rollout.max_num_seqs} or more"
        refuse(config, f"{key}.max_num_batched_tokens", rule, fix)
    for side in ("gen_actor_rollout_ref", "train_actor_rollout_ref"):
        if 0 < value_at(config, f"{side}.rollout.temperature") < LEAST_TEMPERATURE:
            rule, fix = f"vLLM would sample at {LEAST_TEMPERATURE} instead", f"set 0 (greedy), or {LEAST_TEMPERATURE} or more"
            refuse(config, f"{side}.rollout.temperature", rule, fix)
