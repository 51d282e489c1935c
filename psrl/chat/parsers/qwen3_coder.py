"""Qwen3-Coder's XML: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

Values are plain text, nothing in them is escaped, and their types stand in the tool's schema only. So a value may hold any tag of
the format, and its end is a matter of what follows: a value ends at the first `</parameter>` after which (line breaks and spaces
aside) another parameter begins, or the function closes and then the call closes, the next call begins, or the text ends. Any other
tag inside a value is text. Only where a call closes and the next one opens no value goes on: its end was forgotten. What the format
cannot carry is a value that holds such an end, or such a place between calls, itself.

One line break after the opening tag and one before the closing tag belong to the format; all other space belongs to the value.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psrl.chat.parsers.base import ParsedCalls, ToolFormat, tool_formats
from psrl.chat.parsers.json_calls import read_json, said_with, skip_whitespace
from psrl.chat.parsers.written_calls import UnreadableError, WrittenCall, parsed
from psrl.types import ToolSchema

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
END_VALUE = "</parameter>"
END_FUNCTION = "</function>"
SHAPE = f"{OPEN}\n<function=function-name>\n<parameter=parameter-name>\nvalue\n{END_VALUE}\n{END_FUNCTION}\n{CLOSE}"
PYTHON_WORDS = {"True": True, "False": False, "None": None}
"""Qwen3-Coder's own template writes booleans and null as Python does."""

_OPENING = re.compile(rf"{OPEN}|^<function=", re.MULTILINE)
_FUNCTION = re.compile(r"\s*<function=(?P<name>[^<>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=(?P<key>[^<>\n]+)>")
_CLOSING = rf"{END_FUNCTION}\s*(?:{CLOSE}(?![\"'`\\])|\Z|(?={OPEN}|<function=))"
_VALUE_END = re.compile(rf"{END_VALUE}(?=\s*(?:{_PARAMETER.pattern.replace('?P<key>', '?:')}|{_CLOSING}))")
_CALL_END = re.compile(_CLOSING)
_BETWEEN_CALLS = re.compile(rf"{END_FUNCTION}\s*{CLOSE}(?=\s*{OPEN}\s*<function=)")
_CALL_TAG = re.compile(rf"{CLOSE}|(?={OPEN})")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Places:
    """Where a text may end something, in order."""

    value_ends: list[int]
    """Of closing tags of parameters with what must follow them."""
    boundaries: list[int]
    """Of places where one call closes and the next one opens."""


@tool_formats.register("qwen3_coder")
class Qwen3CoderFormat(ToolFormat):
    """Reads and writes Qwen3-Coder's XML."""

    def parse(self, text: str, *, turn: int, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
        """Read every call; see `ToolFormat.parse`. Values of tools and parameters that `tools` does not know stay text."""
        return parsed(text, list(_find(text, {tool.name: tool for tool in tools})), turn=turn)

    def system_text(self, tools: Sequence[ToolSchema]) -> str:
        """The tools and the shape of a call, in the words of Qwen's templates."""
        listed = "\n".join(json.dumps(tool.to_template(), ensure_ascii=False) for tool in tools)
        return (
            f"# Tools\n\nYou have access to the following functions:\n\n<tools>\n{listed}\n</tools>\n\n"
            f"If you choose to call a function ONLY reply in the following format with NO suffix:\n\n{SHAPE}"
        )

    def call_text(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as Qwen's templates write it."""
        values = (
            f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}\n{END_VALUE}\n"
            for key, value in arguments.items()
        )
        return f"{OPEN}\n<function={name}>\n{''.join(values)}{END_FUNCTION}\n{CLOSE}"

    def response_text(self, content: str) -> str:
        """A tool's answer in its tags."""
        return f"<tool_response>\n{content}\n</tool_response>"


def _find(text: str, tools: Mapping[str, ToolSchema]) -> Iterator[WrittenCall]:
    places = _Places(
        value_ends=[match.start() for match in _VALUE_END.finditer(text)],
        boundaries=[match.start() for match in _BETWEEN_CALLS.finditer(text)],
    )
    position = 0
    while opening := _OPENING.search(text, position):
        call = _read(text, opening, places, tools)
        yield call
        position = call.end


def _read(text: str, opening: re.Match[str], places: _Places, tools: Mapping[str, ToolSchema]) -> WrittenCall:
    """The call that `opening` opens; one that cannot be read ends at the next tag around calls after where reading stopped."""
    is_enclosed = opening[0] == OPEN
    begin = opening.end() if is_enclosed else opening.start()
    try:
        name, values, closing = _values(text, begin, places)
        if is_enclosed and not closing[0].endswith(CLOSE):
            raise UnreadableError("unclosed", f"The call has no {CLOSE}.", position=closing.end())
    except UnreadableError as why:
        tag = _CALL_TAG.search(text, max(opening.end(), why.position or 0))
        return WrittenCall(start=opening.start(), end=tag.end() if tag else len(text), said=why)
    try:
        known = _properties(tools.get(name))
        arguments = {key: _typed(key, value, known.get(key)) for key, value in values.items()}
    except UnreadableError as why:
        return WrittenCall(start=opening.start(), end=closing.end(), said=why)
    return WrittenCall(start=opening.start(), end=closing.end(), said=said_with(name, arguments, shape=SHAPE))


def _values(text: str, begin: int, places: _Places) -> tuple[str, dict[str, str], re.Match[str]]:
    """(name, values as they are written, what closes the call)."""
    function = _FUNCTION.match(text, begin)
    if not function:
        is_empty = text.startswith(CLOSE, skip_whitespace(text, begin))
        raise UnreadableError("empty" if is_empty else "missing_name", f"The call has no <function=...>. Write it as:\n{SHAPE}")
    values: dict[str, str] = {}
    position = function.end()
    while parameter := _PARAMETER.match(text, position):
        key = parameter["key"]
        end = _first_from(places.value_ends, parameter.end())
        boundary = _first_from(places.boundaries, parameter.end())
        if end is None or (boundary is not None and boundary < end):
            why = f"The value of {key!r} has no {END_VALUE} that {END_FUNCTION} and {CLOSE} or another parameter follow."
            raise UnreadableError("unclosed", why, position=parameter.end() if boundary is None else boundary)
        if key in values:
            raise UnreadableError("duplicate_parameter", f"The call gives {key!r} twice.", position=end)
        values[key] = text[parameter.end() : end].removeprefix("\n").removesuffix("\n")
        position = skip_whitespace(text, end + len(END_VALUE))
    closing = _CALL_END.match(text, position)
    if not closing:
        is_cut = position == len(text)
        why = f"{END_FUNCTION} and {CLOSE} do not follow the parameters. Write the call as:\n{SHAPE}"
        raise UnreadableError("unclosed" if is_cut else "invalid_xml", why, position=position)
    return function["name"], values, closing


def _first_from(positions: Sequence[int], start: int) -> int | None:
    index = bisect_left(positions, start)
    return positions[index] if index < len(positions) else None


def _typed(key: str, written: str, schema: Any) -> Any:
    """A value as its schema wants it; text where the schema allows text or says nothing."""
    kinds = _kinds(schema)
    word = written.strip()
    if "null" in kinds and word in ("null", "None"):
        return None
    if not kinds or "string" in kinds:
        return written
    if word in PYTHON_WORDS:
        return PYTHON_WORDS[word]
    try:
        value, end = read_json(word, 0)
    except UnreadableError as why:
        cause, end = why.cause, -1
    if end == len(word):
        return value
    cause = "invalid_json" if end >= 0 else cause
    raise UnreadableError(cause, f"The value of {key!r} is not JSON of type {' or '.join(sorted(kinds))}.")


def _kinds(schema: Any) -> frozenset[str]:
    """The JSON types that a schema allows, as far as it names them."""
    if not isinstance(schema, dict):
        return frozenset()
    named = schema.get("type")
    found = {named} if isinstance(named, str) else set(named or ())
    for choice in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        found |= _kinds(choice)
    return frozenset(found)


def _properties(tool: ToolSchema | None) -> Mapping[str, Any]:
    return {} if tool is None else tool.parameters.get("properties", {})
