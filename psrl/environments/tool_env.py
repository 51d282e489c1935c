"""`tool_env`: the model asks for tools, reads their answers, and ends with a turn that calls none.

Invariant: each call of a turn gets exactly one tool message, in the order in which the calls were written, whether it ran, could
not be read, named no tool or was one too many. What the policy got wrong is an observation; what the world got wrong
(`SandboxError`) is raised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from psrl.environments.base import Environment, EnvironmentParts, Info, register_environment
from psrl.errors import ConfigError, EnvironmentFault, ToolError
from psrl.protocols import Tool, ToolResult
from psrl.types import Message, ParsedTurn, Role, Task, ToolCall, ToolCallError


@register_environment("tool_env")
class ToolEnvironment(Environment[Sequence[Message], ParsedTurn]):
    """Runs the calls of each turn, one after the other: a later call may rely on what an earlier one did.

    Info of a step: `tool_calls` (calls written), `tool_turns` (1 when a call of the turn reached a tool),
    `tool_errors/<cause>`, `tool_queue_s` and `tool_run_s`.
    """

    def __init__(self, *, tools: Sequence[Tool], max_calls_per_turn: int, max_tool_response_length: int) -> None:
        """Tools stay their owner's; this object never closes them.

        Raises:
            ConfigError: Two tools have the same name.
        """
        self._tools: dict[str, Tool] = {tool.schema.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            names = [tool.schema.name for tool in tools]
            raise ConfigError(
                key="rollout.multi_turn.tool_config_path", value=names, rule="tools need different names", fix="rename or remove one"
            )
        self._max_calls_per_turn = max_calls_per_turn
        self._max_chars = max_tool_response_length

    @classmethod
    def build(cls, parts: EnvironmentParts) -> ToolEnvironment:
        """With the run's tools and limits."""
        return cls(
            tools=parts.tools,
            max_calls_per_turn=parts.multi_turn.max_calls_per_turn,
            max_tool_response_length=parts.multi_turn.max_tool_response_length,
        )

    async def reset(self, task: Task) -> tuple[Sequence[Message], Info]:
        """The task's own prompt."""
        return task.prompt, {}

    async def step(self, action: ParsedTurn) -> tuple[Sequence[Message], float | None, bool, Info]:
        """One tool message per call; done when the turn has none.

        Raises:
            SandboxError: The place in which a tool runs failed.
            EnvironmentFault: The action is no parsed turn.
        """
        if not isinstance(action, ParsedTurn):
            raise EnvironmentFault(f"tool_env needs the parsed turns of tool_agent_data, got {type(action).__name__}: {action!r:.80}")
        if not action.calls:
            return (), None, True, {}
        answers: list[Message] = []
        numbers: Counter[str] = Counter()
        for position, call in enumerate(action.calls):
            result = await self._answer(call, position, numbers)
            if result.error_cause is not None:
                numbers[f"tool_errors/{result.error_cause}"] += 1
            name = call.name if isinstance(call, ToolCall) else None
            answers.append(Message(role=Role.TOOL, content=head_and_tail(result.text, self._max_chars), tool_call_id=call.id, name=name))
        return answers, None, False, {"tool_calls": len(action.calls), **numbers}

    async def close(self) -> None:
        """Nothing is held: tools belong to the worker."""

    async def _answer(self, call: ToolCall | ToolCallError, position: int, numbers: Counter[str]) -> ToolResult:
        if position >= self._max_calls_per_turn:
            text = f"Error: not run, a turn may make {self._max_calls_per_turn} calls at most."
            return ToolResult(text=text, error_cause="too_many_calls")
        if isinstance(call, ToolCallError):
            return ToolResult(text=f"Error: {call.message}", error_cause=call.cause)
        if call.name not in self._tools:
            known = ", ".join(sorted(self._tools)) or "none"
            return ToolResult(text=f"Error: there is no tool named {call.name!r}. Tools: {known}.", error_cause="unknown_tool")
        numbers["tool_turns"] = 1
        result = await _call(self._tools[call.name], call.arguments)
        numbers.update({"tool_queue_s": result.queue_s, "tool_run_s": result.run_s})
        return result


async def _call(tool: Tool, arguments: Mapping[str, object]) -> ToolResult:
    try:
        return await tool.call(arguments)
    except ToolError as refusal:
        return ToolResult(text=f"Error: {refusal}", error_cause="tool_error")


def head_and_tail(text: str, max_chars: int) -> str:
    """`text`, or its beginning and end around a mark that counts what is left out; never longer than `max_chars`.

    Example:
        `head_and_tail("0123456789" * 10, 40)` -> "0123456\\n[87 characters left out]\\n456789".
    """
    if len(text) <= max_chars:
        return text
    mark = f"\n[{len(text)} characters left out]\n"  # Reserves the room that the mark can need at most.
    room = max_chars - len(mark)
    if room <= 0:
        return text[:max_chars]
    head, tail = (room + 1) // 2, room // 2
    return f"{text[:head]}\n[{len(text) - room} characters left out]\n{text[len(text) - tail :]}"
