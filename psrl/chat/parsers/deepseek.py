"""The formats of DeepSeek V3, R1 and V3.1: special tokens around a name and a JSON object of arguments.

V3 and R1 write `function<sep>name` and the arguments in a Markdown fence; V3.1 writes `name<sep>arguments`. Both are read; calls
are written as V3.1 writes them. The tokens around all calls of a turn are no content, and mean nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from psrl.chat.parsers.base import ParsedCalls, ToolFormat, tool_formats
from psrl.chat.parsers.json_calls import read_json, said_with
from psrl.chat.parsers.written_calls import BrokenCallEnds, UnreadableError, WrittenCall, parsed
from psrl.types import ToolSchema

ALL_OPEN = "<｜tool▁calls▁begin｜>"
ALL_CLOSE = "<｜tool▁calls▁end｜>"
OPEN = "<｜tool▁call▁begin｜>"
CLOSE = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
SHAPE = f"{ALL_OPEN}{OPEN}<function-name>{SEPARATOR}<args-json-object>{CLOSE}{ALL_CLOSE}"

_OPENING = re.compile(rf"(?:{ALL_OPEN}\s*)?{OPEN}|{ALL_OPEN}")
_FENCED = re.compile(rf"\s*function\s*{SEPARATOR}(?P<name>[^<\n]*)\n\s*```(?:json)?\s*")
_BARE = re.compile(rf"(?P<name>[^<]*){SEPARATOR}\s*")
_CLOSING = re.compile(rf"\s*{CLOSE}(?:\s*{ALL_CLOSE})?")
_FENCED_CLOSING = re.compile(rf"\s*```\s*{CLOSE}(?:\s*{ALL_CLOSE})?")


@tool_formats.register("deepseek")
class DeepSeekFormat(ToolFormat):
    """Reads both of DeepSeek's formats, writes that of V3.1."""

    def parse(self, text: str, *, turn: int, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
        """Read every call; see `ToolFormat.parse`."""
        return parsed(text, list(_find(text)), turn=turn)

    def system_text(self, tools: Sequence[ToolSchema]) -> str:
        """The tools and the shape of a call."""
        listed = "\n\n".join(
            f"### {tool.name}\nDescription: {tool.description}\n\nParameters: {json.dumps(tool.parameters, ensure_ascii=False)}"
            for tool in tools
        )
        return (
            f"## Tools\nYou have access to the following tools:\n\n{listed}\n\n"
            f"IMPORTANT: ALWAYS adhere to this exact format for tool use:\n{SHAPE}\n\n"
            f"For several calls, repeat from {OPEN} to {CLOSE} inside one {ALL_OPEN} and {ALL_CLOSE}."
        )

    def call_text(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as V3.1's template writes it."""
        return f"{ALL_OPEN}{OPEN}{name}{SEPARATOR}{json.dumps(dict(arguments), ensure_ascii=False)}{CLOSE}{ALL_CLOSE}"

    def response_text(self, content: str) -> str:
        """A tool's answer in its tokens."""
        return f"<｜tool▁output▁begin｜>{content}<｜tool▁output▁end｜>"


def _find(text: str) -> Iterator[WrittenCall]:
    ends = BrokenCallEnds(text, opens=rf"(?:{ALL_OPEN}|{OPEN})", closes=rf"(?:{CLOSE}(?:\s*{ALL_CLOSE})?|{ALL_CLOSE})")
    position = 0
    while opening := _OPENING.search(text, position):
        call = _read(text, opening, ends)
        yield call
        position = call.end


def _read(text: str, opening: re.Match[str], ends: BrokenCallEnds) -> WrittenCall:
    start, begin = opening.span()
    is_fenced = _FENCED.match(text, begin)
    head = is_fenced or _BARE.match(text, begin)
    name = head["name"].strip() if head else ""
    if head is None or not opening[0].endswith(OPEN) or not name or "\n" in name:
        end, is_closed = ends.end(begin, begin)
        said = UnreadableError("missing_name" if is_closed else "unclosed", f"The call has no name. Write it as:\n{SHAPE}")
        return WrittenCall(start=start, end=end, said=said)
    try:
        arguments, json_end = read_json(text, head.end())
        closing = (_FENCED_CLOSING if is_fenced else _CLOSING).match(text, json_end)
        if not closing:
            extra = f"{CLOSE} does not follow the call's JSON."
            raise UnreadableError("invalid_json", extra, position=json_end)
    except UnreadableError as why:
        end, is_closed = ends.end(head.end(), head.end() if why.position is None else why.position)
        why = why if is_closed else UnreadableError("unclosed", f"The call has no {CLOSE}.")
        return WrittenCall(start=start, end=end, said=why)
    return WrittenCall(start=start, end=closing.end(), said=said_with(name, arguments, shape=SHAPE))
