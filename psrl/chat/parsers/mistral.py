"""Mistral's formats: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}` for each call.

The array is that of tokenizers v3 to v7, the other that of v11 (with `[CALL_ID]...` before `[ARGS]`) and later. Both are read; calls
are written as the newest tokenizers write them. Ids that the policy wrote are not used: psrl numbers calls itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from psrl.chat.parsers.base import ParsedCalls, ToolFormat, tool_formats
from psrl.chat.parsers.json_calls import read_json, said_by, said_with, skip_whitespace
from psrl.chat.parsers.reasoning import split_reasoning
from psrl.chat.parsers.written_calls import BrokenCallEnds, UnreadableError, WrittenCall, parsed
from psrl.types import ToolSchema

OPEN = "[TOOL_CALLS]"
ARGUMENTS = "[ARGS]"
THINK = ("[THINK]", "[/THINK]")
SHAPE = f"{OPEN}<function-name>{ARGUMENTS}<args-json-object>"

_OPENS = re.escape(OPEN)
_HEAD = re.compile(r"\s*(?P<name>[^\[\]{}\s]+)\s*(?:\[CALL_ID\][^\[\]{}]*)?\[ARGS\]\s*")


@tool_formats.register("mistral")
class MistralFormat(ToolFormat):
    """Reads both of Mistral's formats, writes the newer one."""

    def split_reasoning(self, text: str, *, is_open: bool) -> tuple[str | None, str]:
        """Magistral writes `[THINK]`, its first release and others `<think>`."""
        if text.lstrip().startswith(THINK[0]) or (is_open and THINK[1] in text):
            return split_reasoning(text, is_open=is_open, tags=THINK)
        return split_reasoning(text, is_open=is_open)

    def parse(self, text: str, *, turn: int, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
        """Read every call; see `ToolFormat.parse`."""
        return parsed(text, list(_find(text)), turn=turn)

    def system_text(self, tools: Sequence[ToolSchema]) -> str:
        """The tools as Mistral's templates list them, and the shape of a call."""
        listed = json.dumps([tool.to_template() for tool in tools], ensure_ascii=False)
        return f"[AVAILABLE_TOOLS]{listed}[/AVAILABLE_TOOLS]\n\nTo call a tool, write:\n{SHAPE}"

    def call_text(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as the newest tokenizers write it."""
        return f"{OPEN}{name}{ARGUMENTS}{json.dumps(dict(arguments), ensure_ascii=False)}"

    def response_text(self, content: str) -> str:
        """A tool's answer in its tags."""
        return f"[TOOL_RESULTS]{content}[/TOOL_RESULTS]"


def _find(text: str) -> Iterator[WrittenCall]:
    ends = BrokenCallEnds(text, opens=_OPENS, closes=None)
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        position = start + len(OPEN)
        begin = skip_whitespace(text, position)
        if text.startswith("[", begin) and not text.startswith(OPEN, begin):
            for call in _array(text, start, begin, ends):
                yield call
                position = call.end
        else:
            call = _single(text, start, ends)
            yield call
            position = call.end


def _single(text: str, start: int, ends: BrokenCallEnds) -> WrittenCall:
    """The call `[TOOL_CALLS]name[ARGS]{...}`; nothing but its JSON ends it."""
    begin = start + len(OPEN)
    head = _HEAD.match(text, begin)
    if head is None:
        end, _ = ends.end(begin, begin)
        return WrittenCall(start=start, end=end, said=UnreadableError("missing_name", f"The call has no name. Write it as:\n{SHAPE}"))
    try:
        arguments, json_end = read_json(text, head.end())
    except UnreadableError as why:
        end = ends.balanced(head.end()) or ends.end(head.end(), head.end())[0]
        return WrittenCall(start=start, end=end, said=why)
    return WrittenCall(start=start, end=json_end, said=said_with(head["name"], arguments, shape=SHAPE))


def _array(text: str, start: int, begin: int, ends: BrokenCallEnds) -> Iterator[WrittenCall]:
    """The calls of the array whose bracket stands at `begin`, each at its own place; the last one's end is the array's.

    An element that cannot be read ends where its braces are balanced; where they are not, the rest of the array is lost with it.
    A comma after the last element means nothing.
    """
    position = skip_whitespace(text, begin + 1)
    if text.startswith("]", position):
        yield WrittenCall(start=start, end=position + 1, said=UnreadableError("empty", "The list of calls is empty."))
        return
    while True:
        said, item_end = _element(text, position, ends)
        after = len(text) if item_end is None else skip_whitespace(text, item_end)
        if text[after : after + 1] not in (",", "]"):
            is_lost = isinstance(said, UnreadableError)
            yield WrittenCall(start=start, end=ends.end(position, position)[0] if is_lost else after, said=said)
            return
        following = after if text[after] == "]" else skip_whitespace(text, after + 1)
        is_closed = text.startswith("]", following)
        yield WrittenCall(start=start, end=following + is_closed, said=said)
        if is_closed or following == len(text) or text.startswith(OPEN, following):
            return
        start = position = following


def _element(text: str, position: int, ends: BrokenCallEnds) -> tuple[tuple[str, dict[str, Any]] | UnreadableError, int | None]:
    """(what an element of the array says, where it ends or None where that cannot be told)."""
    try:
        value, end = read_json(text, position)
    except UnreadableError as why:
        return why, ends.balanced(position)
    return said_by(value, arguments_keys=("arguments",), shape=f'{OPEN}[{{"name": ..., "arguments": {{...}}}}]'), end
