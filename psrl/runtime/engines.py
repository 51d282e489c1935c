"""The command line of an engine process, as a run, `psrl doctor` and `psrl serve` start it."""

from __future__ import annotations

import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from psrl.config.model import ModelConfig
from psrl.config.rollout import RolloutConfig
from psrl.errors import ConfigError
from psrl.runtime.devices import resolved_device
from psrl.runtime.placement import interface_of

VLLM_VENV = ".venv-vllm"
"""Beside the virtual environment that psrl runs in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeOfInstance:
    """One node of an instance that spans several, for one start of it."""

    num_nodes: int
    rank: int
    """0 serves; the others follow."""
    address: str
    """At which the other nodes reach this one; a private one."""
    meeting_address: str
    """Of the first node."""
    meeting_port: int
    """A free one there, another for each start."""


def engine_command(model: ModelConfig, rollout: RolloutConfig, *, node: NodeOfInstance | None = None) -> list[str]:
    """Command line of the engine that `rollout.name` chooses, on the machine that it will run on. ConfigError: it is not installed."""
    if rollout.name == "scripted":
        assert rollout.script_path is not None, "cross checks ask for script_path"
        slots = ("--max-num-seqs", str(rollout.max_num_seqs))
        return [sys.executable, "-m", "psrl.engines.scripted", "--script", rollout.script_path, *slots]
    return _vllm_command(model, rollout, node) if rollout.name == "vllm" else _torch_command(model, rollout)


def _torch_command(model: ModelConfig, rollout: RolloutConfig) -> list[str]:
    return [
        *(sys.executable, "-m", "psrl.engines.torch"),
        *_shared_arguments(model, rollout),
        *("--num-threads", str(_threads(rollout, num_processes=1))),
    ]


def _vllm_command(model: ModelConfig, rollout: RolloutConfig, node: NodeOfInstance | None) -> list[str]:
    num_processes = rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size * rollout.data_parallel_size
    num_processes //= 1 if node is None else node.num_nodes
    return [
        *(vllm_python(rollout), "-m", "psrl.engines.vllm"),
        *_shared_arguments(model, rollout),
        *("--num-threads", str(_threads(rollout, num_processes=num_processes))),
        *("--tensor-parallel-size", str(rollout.tensor_model_parallel_size)),
        *("--pipeline-parallel-size", str(rollout.pipeline_model_parallel_size)),
        *("--data-parallel-size", str(rollout.data_parallel_size)),
        *("--gpu-memory-utilization", str(rollout.gpu_memory_utilization)),
        *("--max-num-batched-tokens", str(rollout.max_num_batched_tokens)),
        "--enforce-eager" if rollout.enforce_eager else "--no-enforce-eager",
        "--enable-prefix-caching" if rollout.enable_prefix_caching else "--no-enable-prefix-caching",
        *(() if node is None else _node_arguments(node)),
    ]


def _node_arguments(node: NodeOfInstance) -> list[str]:
    interface = interface_of(node.address)
    return [
        *("--num-nodes", str(node.num_nodes), "--node-rank", str(node.rank), "--node-address", node.address),
        *("--meeting-address", node.meeting_address, "--meeting-port", str(node.meeting_port)),
        *(() if interface is None else ("--node-interface", interface)),
    ]


def _shared_arguments(model: ModelConfig, rollout: RolloutConfig) -> list[str]:
    return [
        *("--model-path", model.path),
        *("--max-num-seqs", str(rollout.max_num_seqs)),
        *("--max-model-len", str(rollout.prompt_length + rollout.response_length)),
        *("--dtype", model.served_dtype),
        *("--device", resolved_device(rollout.device)),
    ]


def _threads(rollout: RolloutConfig, *, num_processes: int) -> int:
    """Of each process of a replica that computes; by default all replicas together have as many as there are cores."""
    return rollout.num_threads or max(1, len(os.sched_getaffinity(0)) // (rollout.num_replicas * num_processes))


def vllm_python(rollout: RolloutConfig) -> str:
    """The interpreter of the virtual environment that has vLLM.

    Raises:
        ConfigError: There is none; with the command that makes it.
    """
    key = "gen_actor_rollout_ref.rollout.engine_python"
    fix = f"run scripts/setup.sh vllm, or set {key}=PATH/bin/python of an environment with vLLM and psrl"
    if rollout.engine_python is not None:
        if not Path(rollout.engine_python).is_file():
            raise ConfigError(key=key, value=rollout.engine_python, rule="is no interpreter", fix=fix)
        return str(Path(rollout.engine_python).absolute())
    beside = Path(sys.prefix).parent / VLLM_VENV / "bin" / "python"
    if beside.is_file():
        return str(beside)
    if importlib.util.find_spec("vllm") is not None:
        return sys.executable
    raise ConfigError(key=key, value=None, rule=f"neither {beside} nor this Python has vLLM", fix=fix)
