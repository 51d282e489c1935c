"""Chat messages and tool calls, as OpenAI's API shapes them, but typed.

Only `to_template` and `from_openai` know the dictionary form, which chat templates and HTTP bodies need.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from psrl.errors import MessageError


class Role(StrEnum):
    """Who wrote a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call that the model asked for."""

    id: str
    """Unique inside its episode, such as `call-0-1` (turn, position)."""
    name: str
    arguments: dict[str, Any]
    """Parsed JSON object; its values are hostile input until the tool has checked them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallError:
    """A call that could not be read. It still gets an observation, at its position."""

    id: str
    cause: str
    """Short machine name, counted in metrics: `invalid_json`, `missing_name`, `unclosed`, ..."""
    message: str
    """What the model is told."""
    written: str
    """The call as the policy wrote it, from its first mark to its last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One entry of a conversation."""

    role: Role
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Only in assistant messages."""
    tool_call_id: str | None = None
    """Only in tool messages: the call that this answers."""
    name: str | None = None
    """Only in tool messages: the tool's name."""
    reasoning: str | None = None
    """Thinking that the family keeps apart from the content."""

    def to_template(self) -> dict[str, Any]:
        """The dictionary that Hugging Face chat templates and OpenAI's API read."""
        message: dict[str, Any] = {"role": self.role.value, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        return message

    @staticmethod
    def from_openai(raw: dict[str, Any]) -> Message:
        """Read a plain `{"role", "content"}` message of a dataset row.

        Raises:
            MessageError: The role is unknown or the content is not text.
        """
        role = raw.get("role")
        content = raw.get("content")
        if role not in set(Role):
            raise MessageError(f"message role {role!r} is not one of {[str(r) for r in Role]}")
        if not isinstance(content, str):
            raise MessageError(f"message content must be text, got {type(content).__name__}: {content!r:.80}")
        return Message(role=Role(role), content=content)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSchema:
    """What the model is told about a tool (OpenAI's function schema)."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON Schema of the arguments object."""

    def to_template(self) -> dict[str, Any]:
        """The dictionary that chat templates read in `tools=[...]`."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.parameters},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedTurn:
    """What one sampled turn says, read from its token ids."""

    content: str
    """Text outside of calls and reasoning."""
    reasoning: str | None
    calls: tuple[ToolCall | ToolCallError, ...]
    """In the order in which they were written."""
    text: str
    """The whole turn decoded, special tokens included: for people and scorers, never for training."""
