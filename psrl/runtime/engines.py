"""The command line of an engine process, as a run, `psrl doctor` and `psrl serve` start it."""

from __future__ import annotations

import os
import sys

from psrl.config.model import ModelConfig
from psrl.config.rollout import RolloutConfig
from psrl.runtime.devices import resolved_device


def engine_command(model: ModelConfig, rollout: RolloutConfig) -> list[str]:
    """Command line of the engine that `rollout.name` chooses."""
    if rollout.name == "scripted":
        assert rollout.script_path is not None, "cross checks ask for script_path"
        slots = ("--max-num-seqs", str(rollout.max_num_seqs))
        return [sys.executable, "-m", "psrl.engines.scripted", "--script", rollout.script_path, *slots]
    return [
        *(sys.executable, "-m", "psrl.engines.torch"),
        *("--model-path", model.path),
        *("--max-num-seqs", str(rollout.max_num_seqs)),
        *("--max-model-len", str(rollout.prompt_length + rollout.response_length)),
        *("--dtype", model.dtype),
        *("--num-threads", str(rollout.num_threads or max(1, len(os.sched_getaffinity(0)) // rollout.num_replicas))),
        *("--device", resolved_device(rollout.device)),
    ]
