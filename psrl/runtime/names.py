"""Every registry of a run, and each name that settings choose resolved before anything starts.

Misspelt names of what psrl ships are refused earlier and faster, by `config.cross_checks`; what is left for here is dotted paths.
Generators are not among them: `load_tasks` resolves theirs at once.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import psrl.rewards.custom
import psrl.rewards.execution_scorer
import psrl.rewards.math_scorer
import psrl.rewards.retool
import psrl.rewards.scorer  # noqa: F401
from psrl.agent_data.base import agent_data
from psrl.agent_loops.base import agent_loops
from psrl.algorithms.advantages import advantage_estimators
from psrl.algorithms.losses import policy_losses
from psrl.chat.parsers.base import tool_formats
from psrl.config.fields import value_at
from psrl.config.gateway_checks import KEY, starts_gateway
from psrl.config.rollout_gateway import SESSION_LOOPS
from psrl.config.tree import Config
from psrl.environments.base import environments
from psrl.errors import ConfigError
from psrl.parameter_server.transports.nixl_cpu import MODULES as NIXL_MODULES
from psrl.registry import Registry
from psrl.rewards.base import scorers
from psrl.runtime.engines import vllm_python
from psrl.runtime.imports import make_importable
from psrl.telemetry.trackers import trackers
from psrl.types import Task

REGISTRIES: dict[str, Registry[Any]] = {
    "algorithm.adv_estimator": advantage_estimators,
    "train_actor_rollout_ref.actor.policy_loss": policy_losses,
    "reward.name": scorers,
    "trainer.logger": trackers,
    **{
        f"{side}.rollout.{key}": registry
        for side in ("gen_actor_rollout_ref", "train_actor_rollout_ref")
        for key, registry in (
            ("multi_turn.format", tool_formats),
            ("agent.default_agent_loop", agent_loops),
            ("agent.env.name", environments),
            ("agent.data.name", agent_data),
        )
    },
}
"""Setting -> where its names are registered."""


def resolve_names(config: Config) -> None:
    """Resolve every name that settings choose; `import_folder` may hold the user's own classes.

    Raises:
        ConfigError: A name is neither registered nor importable, or a loop needs a gateway that the run does not start, or the engine is
            not installed.
    """
    make_importable(config.import_folder)
    for key, registry in REGISTRIES.items():
        value = value_at(config, key)
        for name in value if isinstance(value, list) else [value]:
            try:
                if name is not None:
                    registry.resolve(name)
            except ConfigError as error:
                raise ConfigError(key=key, value=name, rule=error.rule, fix=error.fix) from error
        if key.endswith(".default_agent_loop"):
            _check_loop(value, key, config)
    if config.gen_actor_rollout_ref.rollout.name == "vllm":
        vllm_python(config.gen_actor_rollout_ref.rollout)
    if config.psrl.ps_mode == "nixl_cpu" and not any(importlib.util.find_spec(name.partition(".")[0]) for name in NIXL_MODULES):
        fix = "pip install nixl, or set psrl.ps_mode=cpu_ref"
        raise ConfigError(key="psrl.ps_mode", value="nixl_cpu", rule="NIXL is not installed", fix=fix)


def check_loop_of(task: Task, config: Config) -> None:
    """The loop that a row names for itself.

    Raises:
        ConfigError: It needs a gateway that the run does not start. Unknown names are left to the episode.
    """
    if task.agent_name in (*SESSION_LOOPS, *agent_loops.names):
        _check_loop(task.agent_name, f"agent_name of {task.uid}", config)


def _check_loop(name: str, key: str, config: Config) -> None:
    is_needed = name in SESSION_LOOPS or getattr(agent_loops.resolve(name), "needs_sessions", False)
    if is_needed and not starts_gateway(config):
        rule = "its turns are chat completions in sessions, and this run starts no gateway"
        raise ConfigError(key=key, value=name, rule=rule, fix=f"set {KEY}.enable=true")
