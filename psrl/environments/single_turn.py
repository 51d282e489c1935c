"""`single_turn`: shows the task's prompt, takes one answer, judges nothing. The environment of `generate_only_agent`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from psrl.environments.base import Environment, Info, register_environment
from psrl.types import Message, Task


@register_environment("single_turn")
class SingleTurnEnvironment(Environment[Sequence[Message], Any]):
    """One question, one answer; the reward comes from a scorer."""

    async def reset(self, task: Task) -> tuple[Sequence[Message], Info]:
        """The task's own prompt."""
        return task.prompt, {}

    async def step(self, action: Any) -> tuple[Sequence[Message], float | None, bool, Info]:
        """Any answer ends the episode."""
        return (), None, True, {}

    async def close(self) -> None:
        """Nothing is held."""
