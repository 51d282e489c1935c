"""Tools in words, for templates that know nothing of them.

SmolLM2's template prints any role as it comes and never shows `tools`, so the model would not learn that it has any. Then the
system message describes the tools, calls stand in the assistant's text, and answers come as a user message, all in the words of
the tool-call format. A template that treats tools in any way of its own is never touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from psrl.chat.parsers import ToolFormat
from psrl.types import Message, Role, ToolSchema


def as_plain_messages(messages: Sequence[Message], tools: Sequence[ToolSchema], tool_format: ToolFormat) -> list[Message]:
    """The same conversation with roles system, user and assistant only, and no tool calls.

    With tools and no system message, one is added; a default system message of the template's own is then not rendered.
    Consecutive tool messages become one user message.

    Example:
        [tool "5", tool "6"] -> [user "<tool_response>\\n5\\n</tool_response>\\n<tool_response>\\n6\\n</tool_response>"].
    """
    plain: list[Message] = []
    for role, group in groupby(messages, key=lambda message: message.role):
        if role is Role.TOOL:
            plain.append(Message(role=Role.USER, content="\n".join(tool_format.response_text(message.content) for message in group)))
        elif role is Role.ASSISTANT:
            plain.extend(
                Message(role=Role.ASSISTANT, content=text_with_calls(message, tool_format), reasoning=message.reasoning)
                for message in group
            )
        else:
            plain.extend(group)
    if not tools:
        return plain
    described = tool_format.system_text(tools)
    if plain and plain[0].role is Role.SYSTEM:
        return [Message(role=Role.SYSTEM, content=f"{plain[0].content}\n\n{described}"), *plain[1:]]
    return [Message(role=Role.SYSTEM, content=described), *plain]


def text_with_calls(message: Message, tool_format: ToolFormat) -> str:
    """An assistant's content and calls, as it writes them: the calls after the content, each on a line of its own."""
    calls = [tool_format.call_text(call.name, call.arguments) for call in message.tool_calls]
    return "\n".join([message.content, *calls] if message.content else calls)
