"""Llama 3.1's JSON format: `{"name": ..., "parameters": {...}}` as the turn, or several of them one after another.

No tags enclose a call, so what is a call is decided by its beginning: after `<|python_tag|>` everything is meant as one; elsewhere
an object is meant as one that stands at the beginning of a line and begins with a name that is text and then its parameters, or
that follows another call. All other JSON is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from psrl.chat.parsers.base import ParsedCalls, ToolFormat, tool_formats
from psrl.chat.parsers.json_calls import read_json, said_by
from psrl.chat.parsers.written_calls import BrokenCallEnds, UnreadableError, WrittenCall, parsed
from psrl.types import ToolSchema

TAG = "<|python_tag|>"
SHAPE = '{"name": <function-name>, "parameters": <args-json-object>}'

_TAG = re.escape(TAG)
_BEGINNING = r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"(?:[^"\\\n]|\\.)*"\s*,\s*"(?:parameters|arguments)"\s*:'
_FIRST = re.compile(rf"(?:^|\A\s*|(?={_TAG}))(?P<call>{_TAG}\s*|(?={_BEGINNING}))", re.MULTILINE)
_NEXT = re.compile(rf"[\s;]*(?P<call>{_TAG}\s*|(?={_BEGINNING}))")
_SEPARATORS = re.compile(r"(?:\s*;)*[ \t]*")


@tool_formats.register("llama3_json")
class Llama3JsonFormat(ToolFormat):
    """Reads and writes Llama 3.1's JSON calls."""

    def parse(self, text: str, *, turn: int, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
        """Read every call; see `ToolFormat.parse`."""
        return parsed(text, list(_find(text)), turn=turn)

    def system_text(self, tools: Sequence[ToolSchema]) -> str:
        """The tools and the shape of a call, in the words of Llama 3.1's template."""
        listed = "\n\n".join(json.dumps(tool.to_template(), ensure_ascii=False, indent=4) for tool in tools)
        return (
            "You have access to the following functions. To call a function, please respond with JSON for a function call. "
            'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}. '
            f"Do not use variables.\n\n{listed}"
        )

    def call_text(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as Llama 3.1's template writes it."""
        return json.dumps({"name": name, "parameters": dict(arguments)}, ensure_ascii=False)

    def response_text(self, content: str) -> str:
        """A tool's answer; the format has no words around it."""
        return content


def _find(text: str) -> Iterator[WrittenCall]:
    ends = BrokenCallEnds(text, opens=_TAG, closes=None)
    opening = _FIRST.search(text)
    while opening:
        call = _read(text, opening, ends)
        opening = _NEXT.match(text, call.end) or _FIRST.search(text, call.end)
        yield call


def _read(text: str, opening: re.Match[str], ends: BrokenCallEnds) -> WrittenCall:
    """The call whose JSON begins where `opening` ends; semicolons after it belong to it."""
    start, begin = opening.span("call")
    try:
        value, end = read_json(text, begin)
    except UnreadableError as why:
        end = ends.balanced(begin) or ends.end(begin, begin)[0]
        return WrittenCall(start=start, end=max(begin, end), said=why)
    if separators := _SEPARATORS.match(text, end):
        end = separators.end()
    return WrittenCall(start=start, end=end, said=said_by(value, arguments_keys=("parameters", "arguments"), shape=SHAPE))
