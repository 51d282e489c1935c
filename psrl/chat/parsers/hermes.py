"""The Hermes format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Qwen and Hermes models write it.

A scanner, not a pattern: inside a JSON string nothing ends a call, so code may hold quotes, braces, line breaks and the closing
tag itself. Every opening tag outside of another call gives exactly one call or one error, in order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from psrl.chat.parsers.base import ParsedCalls, call_id, tool_formats
from psrl.types import ToolCall, ToolCallError, ToolSchema

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
WHITESPACE = " \t\r\n"
MAX_DEPTH = 64
"""Of lists and objects inside each other; far beyond what a tool asks for, far below the interpreter's stack."""
SHAPE = f'{OPEN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{CLOSE}'


class _BrokenCallError(Exception):
    """Why a call cannot be used, and where reading goes on."""

    def __init__(self, cause: str, message: str, *, end: int) -> None:
        super().__init__(message)
        self.cause = cause
        self.message = message
        self.end = end


@tool_formats.register("hermes")
class HermesFormat:
    """Reads and writes the Hermes format."""

    def parse(self, text: str, *, turn: int) -> ParsedCalls:
        """Read every call; see `ToolFormat.parse`.

        Causes of errors: `invalid_json`, `invalid_unicode`, `too_deep`, `not_an_object`, `missing_name`,
        `arguments_not_object`, `unclosed`, `empty`.
        """
        prose: list[str] = []
        calls: list[ToolCall | ToolCallError] = []
        position = 0
        while (start := text.find(OPEN, position)) >= 0:
            prose.append(text[position:start])
            identity = call_id(turn, len(calls))
            try:
                name, arguments, position = _read_call(text, start + len(OPEN))
                calls.append(ToolCall(id=identity, name=name, arguments=arguments))
            except _BrokenCallError as broken:
                written = text[start : broken.end]
                calls.append(ToolCallError(id=identity, cause=broken.cause, message=broken.message, written=written))
                position = broken.end
        prose.append(text[position:])
        content = "\n".join(part for part in (piece.strip("\n") for piece in prose) if part) if calls else text
        return ParsedCalls(content=content, calls=tuple(calls))

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


def _read_call(text: str, start: int) -> tuple[str, dict[str, Any], int]:
    """(name, arguments, where the call ends) of the call whose opening tag ends at `start`."""
    begin = _skip_whitespace(text, start)
    if begin == len(text):
        raise _BrokenCallError("unclosed", f"The call is empty and has no {CLOSE}. Write it as:\n{SHAPE}", end=begin)
    if text.startswith(CLOSE, begin):
        raise _BrokenCallError("empty", f"The call is empty. Write it as:\n{SHAPE}", end=begin + len(CLOSE))
    try:
        value, json_end = _DECODER.raw_decode(text, begin)
    except RecursionError:
        raise _broken(text, begin, "too_deep", "The call's JSON is nested too deeply.") from None
    except ValueError as error:
        raise _broken(text, begin, "invalid_json", f"The call is not valid JSON: {_describe(error, begin)}.") from None
    after = _skip_whitespace(text, json_end)
    if not text.startswith(CLOSE, after):
        if after == len(text) or text.startswith(OPEN, after):
            raise _BrokenCallError("unclosed", f"The call has no {CLOSE} after its JSON.", end=after)
        raise _broken(text, begin, "invalid_json", f"There is text between the call's JSON and {CLOSE}: {text[after : after + 20]!r}.")
    end = after + len(CLOSE)
    name, arguments = _check(value, end)
    return name, arguments, end


def _check(value: Any, end: int) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a decoded call; missing arguments are none, which the tool then judges."""
    if not isinstance(value, dict):
        raise _BrokenCallError("not_an_object", f"The call is a JSON {_kind(value)}, not an object. Write it as:\n{SHAPE}", end=end)
    if not isinstance(value.get("name"), str) or not value["name"]:
        raise _BrokenCallError("missing_name", f'The call has no "name" that is text. Write it as:\n{SHAPE}', end=end)
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        rule = f'"arguments" of the call is a JSON {_kind(arguments)}, not an object. Write it as:\n{SHAPE}'
        raise _BrokenCallError("arguments_not_object", rule, end=end)
    if not _is_encodable(value["name"], arguments, end):
        raise _BrokenCallError("invalid_unicode", "The call holds half of a surrogate pair, which is no character.", end=end)
    return value["name"], arguments


def _broken(text: str, begin: int, cause: str, message: str) -> _BrokenCallError:
    """The error of a call whose JSON cannot be read: the call reaches to its closing tag, or to the next call.

    Tags inside JSON strings do not count, unless a quote that is never closed hides all that follows.
    """
    end, tag = _next_tag(text, begin)
    first_close = text.find(CLOSE, begin)
    hides_calls = first_close >= 0 and text.startswith(OPEN, _skip_whitespace(text, first_close + len(CLOSE)))
    if first_close >= 0 and (tag is None or (hides_calls and first_close < end)):
        end, tag = first_close, CLOSE
    if tag == CLOSE:
        return _BrokenCallError(cause, message, end=end + len(CLOSE))
    return _BrokenCallError("unclosed", f"The call has no {CLOSE}.", end=end)


def _next_tag(text: str, begin: int) -> tuple[int, str | None]:
    """Where the first tag outside of JSON strings stands, and which; (length of text, None) if there is none."""
    in_string = False
    position = begin
    while position < len(text):
        character = text[position]
        if in_string and character == "\\":
            position += 2
            continue
        if character == '"':
            in_string = not in_string
        elif character == "<" and not in_string:
            for tag in (OPEN, CLOSE):
                if text.startswith(tag, position):
                    return position, tag
        position += 1
    return len(text), None


def _skip_whitespace(text: str, position: int) -> int:
    while position < len(text) and text[position] in WHITESPACE:
        position += 1
    return position


def _describe(error: ValueError, begin: int) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos - begin}"
    return str(error)


def _kind(value: Any) -> str:
    kinds = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", dict: "object", type(None): "null"}
    return kinds[type(value)]


def _is_encodable(name: str, arguments: dict[str, Any], end: int) -> bool:
    """Whether every text inside can be written as UTF-8 (a lone \\ud800 cannot, and would fail far from here).

    Raises `too_deep` for nesting that would exhaust the stack of whoever writes the arguments as JSON again.
    """
    texts = [name]
    pending: list[tuple[Any, int]] = [(arguments, 1)]
    while pending:
        value, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise _BrokenCallError("too_deep", f"The call's JSON is nested more than {MAX_DEPTH} deep.", end=end)
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, list):
            pending += [(item, depth + 1) for item in value]
        elif isinstance(value, dict):
            texts += value
            pending += [(item, depth + 1) for item in value.values()]
    return not any("\ud800" <= character <= "\udfff" for text in texts for character in text)


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON value")


def _finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise ValueError(f"the number {literal[:20]} is too large")
    return number


# Not strict: models write real line breaks inside strings, and what they mean is clear.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse_constant, parse_float=_finite)
