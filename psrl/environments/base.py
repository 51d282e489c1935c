"""Environments by name, and how one is made for an episode.

An environment needs nothing but the three methods of `Environment`; `README.md` beside this file is the guide. One that wants
the run's tools or limits has a classmethod `build(parts)`, every other class is called without arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from psrl.config.rollout import MultiTurnConfig
from psrl.protocols import Environment, Info, Sandboxes, Tool
from psrl.registry import Registry
from psrl.types import SandboxLimits

__all__ = ["Environment", "EnvironmentParts", "Info", "build_environment", "environments", "register_environment"]

environments: Registry[type] = Registry("environment", key="rollout.agent.env.name")


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentParts:
    """What a run offers to its environments."""

    tools: Sequence[Tool] = ()
    """Shared by all episodes of a worker; not to be closed by an environment."""
    sandboxes: Sandboxes | None = None
    """Makes a sandbox for the environment, which starts and stops it. None outside of a run."""
    sandbox_limits: SandboxLimits = field(default_factory=SandboxLimits)
    """What a sandbox of the run may use."""
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    agent_loop_config_path: str | None = None
    """`rollout.agent.agent_loop_config_path`: the YAML of an agent program, for environments that read it."""


def register_environment(name: str) -> Callable[[type], type]:
    """Class decorator: the environment can be chosen by `name`."""
    return environments.register(name)


def build_environment(name: str, parts: EnvironmentParts) -> Environment[Any, Any]:
    """A new environment for one episode.

    Args:
        name: A registered name or a dotted path `package.module.Class`.
        parts: Given to the class's `build`, if it has one.

    Raises:
        ConfigError: Nothing has this name.
    """
    return instantiate(environments.resolve(name), parts)


def instantiate(environment_class: type, parts: EnvironmentParts) -> Environment[Any, Any]:
    """`environment_class.build(parts)` where there is a `build`, else `environment_class()`."""
    build = getattr(environment_class, "build", environment_class)
    made: Environment[Any, Any] = build() if build is environment_class else build(parts)
    return made
