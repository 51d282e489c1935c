"""Tool-call formats by name: how a policy writes calls, and how psrl tells it about tools where its template does not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from psrl.chat.parsers.reasoning import split_reasoning
from psrl.registry import Registry
from psrl.types import ToolCall, ToolCallError, ToolSchema


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedCalls:
    """A turn's text, reasoning already taken away, split into prose and calls."""

    content: str
    calls: tuple[ToolCall | ToolCallError, ...]


class ToolFormat(Protocol):
    """One way to write calls in text. Stateless; built without arguments. Derive from it.

    `docs/tool_formats.md` shows every format that psrl ships, what ends a call in it, and the causes of its errors.
    """

    def split_reasoning(self, text: str, *, is_open: bool) -> tuple[str | None, str]:
        """(reasoning or None, the rest, which `parse` reads). Replaced by formats that mark reasoning otherwise than `<think>`.

        Args:
            text: The whole turn decoded, without the token that ended it.
            is_open: The assistant's header has opened the reasoning already.
        """
        return split_reasoning(text, is_open=is_open)

    def parse(self, text: str, *, turn: int, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
        """Read every call of `text`, broken ones as errors at their position; never raises for what the text says.

        Args:
            text: A whole turn, reasoning taken away. Turns are never read in parts.
            turn: Its number in the episode, for the ids of its calls.
            tools: What was offered; only formats that write values without their type look at it.
        """

    def system_text(self, tools: Sequence[ToolSchema]) -> str:
        """What a system message says about `tools`, for templates that know nothing of tools."""

    def call_text(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as the policy would write it."""

    def response_text(self, content: str) -> str:
        """A tool's answer as it stands inside a user message, for templates that know nothing of tools."""


tool_formats = Registry[type[ToolFormat]]("tool-call format", key="rollout.multi_turn.format")


def call_id(turn: int, position: int) -> str:
    """`call-<turn>-<position>`, unique inside an episode."""
    return f"call-{turn}-{position}"
