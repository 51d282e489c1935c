"""Conversations in the shape that a strict template accepts; only what the template was seen to refuse is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from psrl.types import Message, Role

BETWEEN = "\n\n"
"""What Gemma's own template puts between a system message and the user message that takes it in."""


def with_system_as_user(messages: Sequence[Message], *, keeps_first: bool) -> list[Message]:
    """System messages become the user's, for templates that refuse them or leave them out without a word.

    Args:
        messages: A conversation or a part of one.
        keeps_first: A system message at the start stays one.
    """
    return [
        replace(message, role=Role.USER) if message.role is Role.SYSTEM and not (keeps_first and position == 0) else message
        for position, message in enumerate(messages)
    ]


def alternating(messages: Sequence[Message]) -> list[Message]:
    """User messages that stand side by side joined, and assistant messages without calls.

    Example:
        [user "<tool_response>...", user "go on"] -> [user "<tool_response>...\\n\\ngo on"].
    """
    joined: list[Message] = []
    for message in messages:
        is_plain = message.role in (Role.USER, Role.ASSISTANT) and not message.tool_calls
        if is_plain and joined and joined[-1].role is message.role and not joined[-1].tool_calls:
            joined[-1] = replace(joined[-1], content=BETWEEN.join([joined[-1].content, message.content]))
        else:
            joined.append(message)
    return joined


def with_one_text_per_call(messages: Sequence[Message]) -> list[Message]:
    """What an assistant said beside a call becomes part of its reasoning, for templates that take one of the two."""
    return [
        replace(message, content="", reasoning=BETWEEN.join([message.reasoning, message.content]))
        if message.tool_calls and message.reasoning and message.content
        else message
        for message in messages
    ]
