"""A task: one dataset row, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from psrl.types.ids import TaskUid
from psrl.types.message import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What an episode starts from."""

    uid: TaskUid
    prompt: tuple[Message, ...]
    """At least one message; never contains assistant turns that would be trained on."""
    data_source: str
    """Chooses the reward where a recipe has several; verl's field of the same name."""
    ground_truth: Any = None
    """The reference answer: `reward_model.ground_truth` of the row."""
    extra_info: dict[str, Any] = field(default_factory=dict)
    """Whatever else the row holds; passed to environments and rewards, never rendered."""
    agent_name: str | None = None
    """Agent loop for this task; None takes `rollout.agent.default_agent_loop`."""
    env_class: str | None = None
    """Environment for this task; None takes `rollout.agent.env.name`."""
    data_class: str | None = None
    """AgentData for this task; None takes `rollout.agent.data.name`."""
