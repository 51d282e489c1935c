"""Settings that only the `vllm` engine reads."""

import pytest

from psrl.config.load import load_config
from psrl.config.vllm_checks import VLLM_KEYS
from psrl.errors import ConfigError

GEN = "gen_actor_rollout_ref.rollout"
OTHER_THAN_DEFAULT = {
    "engine_python": "/usr/bin/python3",
    "tensor_model_parallel_size": "2",
    "pipeline_model_parallel_size": "2",
    "data_parallel_size": "2",
    "gpu_memory_utilization": "0.8",
    "enforce_eager": "false",
    "max_num_batched_tokens": "4096",
    "enable_prefix_caching": "false",
}


@pytest.mark.parametrize("name", VLLM_KEYS)
def test_what_only_vllm_reads_is_refused_for_another_engine(name):
    with pytest.raises(ConfigError, match=f"{name}.*has no effect while.*torch"):
        load_config("retool_tiny", [f"{GEN}.{name}={OTHER_THAN_DEFAULT[name]}"])


def test_what_only_vllm_reads_is_taken_for_vllm():
    overrides = [f"{GEN}.{name}={value}" for name, value in OTHER_THAN_DEFAULT.items()]
    rollout = load_config("retool_tiny", [f"{GEN}.name=vllm", *overrides]).gen_actor_rollout_ref.rollout
    assert (rollout.tensor_model_parallel_size, rollout.enforce_eager) == (2, False)


def test_a_step_must_hold_a_token_of_each_sequence():
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens.*less than one token"):
        load_config("retool_tiny", [f"{GEN}.name=vllm", f"{GEN}.max_num_batched_tokens=1"])


def test_an_adapter_may_be_sent_to_vllm_as_it_is():
    """tests/engines/test_vllm_engine.py says what vLLM makes of it."""
    config = load_config("retool_tiny", [f"{GEN}.name=vllm", "train_actor_rollout_ref.model.lora_rank=4"])
    assert not config.train_actor_rollout_ref.model.lora_merge


@pytest.mark.parametrize("side", ["gen_actor_rollout_ref", "train_actor_rollout_ref"])
def test_a_temperature_that_vllm_would_change_is_refused(side):
    with pytest.raises(ConfigError, match=rf"{side}\.rollout\.temperature.*vLLM would sample at 0\.01"):
        load_config("retool_tiny", [f"{GEN}.name=vllm", f"{GEN}.temperature=1.0", f"{side}.rollout.temperature=0.005"])
    load_config("retool_tiny", [f"{GEN}.name=vllm", f"{GEN}.temperature=1.0", f"{side}.rollout.temperature=0.01"])
