"""Agent data by name, and how one is made for an episode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from psrl.config.rollout import MultiTurnConfig
from psrl.protocols import AgentData, Info, Renderer
from psrl.registry import Registry
from psrl.types import SandboxLimits, ToolSchema, TrajectoryUid

__all__ = ["AgentData", "AgentDataParts", "Info", "agent_data", "build_agent_data", "register_agent_data"]

agent_data: Registry[type] = Registry("agent data", key="rollout.agent.data.name")


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentDataParts:
    """What an agent data is made from."""

    renderer: Renderer
    trajectory_uid: TrajectoryUid
    tool_schemas: Sequence[ToolSchema] = ()
    """Shown to the model in the first prompt."""
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    agent_loop_config_path: str | None = None
    """`rollout.agent.agent_loop_config_path`: the YAML of an agent program, for agent data that reads it."""
    sandbox_wall_s: float = SandboxLimits().wall_s
    """`sandbox.wall_s`: seconds of a command whose YAML says none."""


def register_agent_data(name: str) -> Callable[[type], type]:
    """Class decorator: the agent data can be chosen by `name`."""
    return agent_data.register(name)


def build_agent_data(name: str, parts: AgentDataParts) -> AgentData[Any, Any]:
    """A new agent data for one episode: `Class.build(parts)` where there is a `build`, else `Class(parts)`.

    Args:
        name: A registered name or a dotted path `package.module.Class`.
        parts: The renderer is shared, the trajectory's uid is this episode's.

    Raises:
        ConfigError: Nothing has this name.
    """
    agent_data_class = agent_data.resolve(name)
    made: AgentData[Any, Any] = getattr(agent_data_class, "build", agent_data_class)(parts)
    return made
