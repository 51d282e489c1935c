"""The Hermes format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen and Hermes models write it.

A scanner, not a pattern: inside a JSON string nothing ends a call, so code may hold quotes, braces, line breaks and the closing
tag itself. Every opening tag outside of another call gives exactly one call or one error, in order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from psrl.chat.parsers.base import ParsedCalls, ToolFormat, tool_formats
from psrl.chat.parsers.json_calls import read_json, said_by, skip_whitespace
from psrl.chat.parsers.written_calls import BrokenCallEnds, UnreadableError, WrittenCall, parsed
from psrl.types import ToolSchema

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
SHAPE = f'{OPEN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{CLOSE}'


@tool_formats.register("hermes")
class HermesFormat(ToolFormat):
    """Reads and writes the Hermes format."""

    def parse(self, text: str, *, turn: int, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
        """Read every call; see `ToolFormat.parse`."""
        return parsed(text, list(_find(text)), turn=turn)

    def system_text(self, tools: Sequence[ToolSchema]) -> str:
        """The tools and the shape of a call, in the words that Hermes-style models were trained on."""
        listed = "\n".join(json.dumps(tool.to_template(), ensure_ascii=False) for tool in tools)
        return (
            "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n"
            f"<tools>\n{listed}\n</tools>\n\n"
            "For each function call, return a json object with function name and arguments within "
            f"{OPEN}{CLOSE} XML tags:\n{SHAPE}"
        )

    def call_text(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as Qwen's template writes it."""
        body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
        return f"{OPEN}\n{body}\n{CLOSE}"

    def response_text(self, content: str) -> str:
        """A tool's answer in its tags."""
        return f"<tool_response>\n{content}\n</tool_response>"


def _find(text: str) -> Iterator[WrittenCall]:
    ends = BrokenCallEnds(text, opens=OPEN, closes=CLOSE)
    position = 0
    while (start := text.find(OPEN, position)) >= 0:
        call = _read(text, start, ends)
        yield call
        position = call.end


def _read(text: str, start: int, ends: BrokenCallEnds) -> WrittenCall:
    """The call whose opening tag stands at `start`."""
    begin = skip_whitespace(text, start + len(OPEN))
    if begin == len(text) or text.startswith(OPEN, begin):
        return WrittenCall(start=start, end=begin, said=UnreadableError("unclosed", f"The call is empty. Write it as:\n{SHAPE}"))
    if text.startswith(CLOSE, begin):
        said = UnreadableError("empty", f"The call is empty. Write it as:\n{SHAPE}")
        return WrittenCall(start=start, end=begin + len(CLOSE), said=said)
    try:
        value, json_end = read_json(text, begin)
    except UnreadableError as why:
        return _broken(start, begin, why, ends)
    after = skip_whitespace(text, json_end)
    if not text.startswith(CLOSE, after):
        extra = f"There is text between the call's JSON and {CLOSE}: {text[after : after + 20]!r}."
        return _broken(start, begin, UnreadableError("invalid_json", extra, position=after), ends)
    end = after + len(CLOSE)
    return WrittenCall(start=start, end=end, said=said_by(value, arguments_keys=("arguments",), shape=SHAPE))


def _broken(start: int, begin: int, why: UnreadableError, ends: BrokenCallEnds) -> WrittenCall:
    end, is_closed = ends.end(begin, begin if why.position is None else why.position)
    return WrittenCall(start=start, end=end, said=why if is_closed else UnreadableError("unclosed", f"The call has no {CLOSE}."))
