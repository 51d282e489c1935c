"""`tool_agent_data`: the action is the parsed turn, calls and broken calls included. The counterpart of `tool_env`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from psrl.agent_data.base import AgentDataParts, Info, register_agent_data
from psrl.agent_data.conversation import ConversationAgentData
from psrl.types import Message, ParsedTurn

ERROR_PREFIX = "tool_errors/"


@register_agent_data("tool_agent_data")
class ToolAgentData(ConversationAgentData[ParsedTurn]):
    """Counts tool use as the environment reports it, so that a call which was cut and never ran is not counted.

    Counts: `tool_calls`, `tool_turns` (turns of which a call reached a tool) and `tool_errors/<cause>`.
    """

    def __init__(self, parts: AgentDataParts) -> None:
        """One object serves one episode."""
        super().__init__(parts)
        self._counts: Counter[str] = Counter({"tool_calls": 0, "tool_turns": 0})

    def read_action(self, parsed: ParsedTurn) -> ParsedTurn:
        """The parsed turn as it is."""
        return parsed

    def observe(self, observation: Sequence[Message] | str, info: Info) -> None:
        """Render the tools' answers and count them."""
        super().observe(observation, info)
        self._counts.update({name: value for name, value in info.items() if name in self._counts or name.startswith(ERROR_PREFIX)})

    def counts(self) -> dict[str, float]:
        """`tool_calls`, `tool_turns` and `tool_errors/<cause>`."""
        return {name: float(value) for name, value in self._counts.items()}
