"""The tools of an episode together: one observation for every call that the policy wrote, in the order in which it wrote them."""

from __future__ import annotations

from collections.abc import Sequence

from psrl.errors import ConfigError
from psrl.protocols import Tool, ToolResult
from psrl.types import ToolCall, ToolCallError, ToolSchema

DEFAULT_MAX_CALLS_PER_TURN = 8


class ToolGroup:
    """Tools by name. Shared by all episodes of a worker; holds no episode state."""

    def __init__(self, members: Sequence[Tool], *, max_calls_per_turn: int = DEFAULT_MAX_CALLS_PER_TURN) -> None:
        """Raises ConfigError when two tools have one name."""
        self._members: dict[str, Tool] = {}
        self._max_calls_per_turn = max_calls_per_turn
        for member in members:
            name = member.schema.name
            if name in self._members:
                raise ConfigError(key="tools", value=name, rule="two tools have this name", fix="rename one with tool_schema")
            self._members[name] = member

    @property
    def schemas(self) -> tuple[ToolSchema, ...]:
        """In the order given."""
        return tuple(member.schema for member in self._members.values())

    async def call_all(self, calls: Sequence[ToolCall | ToolCallError]) -> list[ToolResult]:
        """Run the calls of one turn one after the other, since a later one may build on an earlier; result i answers call i.

        Raises:
            SandboxError: The world failed; says nothing about the policy.
        """
        results = []
        for position, call in enumerate(calls):
            if position >= self._max_calls_per_turn:
                text = f"Error: at most {self._max_calls_per_turn} tool calls per turn; this one was not run"
                results.append(ToolResult(text=text, error_cause="too_many_calls"))
            else:
                results.append(await self.call(call))
        return results

    async def call(self, call: ToolCall | ToolCallError) -> ToolResult:
        """Run one call; a broken one or an unknown name is answered with what is wrong."""
        if isinstance(call, ToolCallError):
            return ToolResult(text=f"Error: {call.message}", error_cause=call.cause)
        if call.name not in self._members:
            known = ", ".join(self._members) or "none"
            return ToolResult(text=f"Error: unknown tool {call.name!r}. Known tools: {known}", error_cause="unknown_tool")
        return await self._members[call.name].call(call.arguments)

    async def close(self) -> None:
        """Close every tool."""
        for member in self._members.values():
            await member.close()
