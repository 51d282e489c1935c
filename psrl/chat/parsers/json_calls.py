"""JSON as policies write it, and calls as JSON objects: what can be used is read, what cannot be has a cause.

Causes: `invalid_json`, `invalid_unicode`, `too_deep`, `not_an_object`, `missing_name`, `arguments_not_object`, and `unclosed` and
`empty` from the formats.
"""

from __future__ import annotations

import json
import math
from typing import Any

from psrl.chat.parsers.written_calls import UnreadableError

MAX_DEPTH = 64
"""Of lists and objects inside each other; far beyond what a tool asks for, far below the interpreter's stack."""
MAX_DIGITS = 4300
"""Of a whole number; the interpreter converts no longer ones."""
WHITESPACE = " \t\r\n"


def read_json(text: str, begin: int) -> tuple[Any, int]:
    """(the JSON value that begins at `begin`, where it ends).

    Raises:
        UnreadableError: With the position where reading stopped.
    """
    try:
        return _DECODER.raw_decode(text, begin)
    except RecursionError:
        raise UnreadableError("too_deep", "The call's JSON is nested too deeply.", position=begin) from None
    except json.JSONDecodeError as error:
        message = f"The call is not valid JSON: {error.msg} at character {error.pos - begin}."
        raise UnreadableError("invalid_json", message, position=error.pos) from None


def said_by(value: Any, *, arguments_keys: tuple[str, ...], shape: str) -> tuple[str, dict[str, Any]] | UnreadableError:
    """What a call says that is a JSON object; missing arguments are none, which the tool then judges.

    Args:
        value: The JSON value.
        arguments_keys: Names under which the arguments may stand; the first that is there counts.
        shape: How a call is written, for the model.
    """
    if not isinstance(value, dict):
        return UnreadableError("not_an_object", f"The call is a JSON {kind(value)}, not an object. Write it as:\n{shape}")
    if not isinstance(value.get("name"), str) or not value["name"]:
        return UnreadableError("missing_name", f'The call has no "name" that is text. Write it as:\n{shape}')
    key = next((key for key in arguments_keys if key in value), arguments_keys[0])
    return said_with(value["name"], value.get(key, {}), shape=shape)


def said_with(name: str, arguments: Any, *, shape: str) -> tuple[str, dict[str, Any]] | UnreadableError:
    """What a call with these arguments says, if they are an object that can be written as JSON in UTF-8 again.

    Half of a surrogate pair cannot be written, nor can NaN, and deep nesting exhausts the stack of whoever tries.
    """
    if not isinstance(arguments, dict):
        why = f"The call's arguments are a JSON {kind(arguments)}, not an object. Write it as:\n{shape}"
        return UnreadableError("arguments_not_object", why)
    texts = [name]
    pending: list[tuple[Any, int]] = [(arguments, 1)]
    while pending:
        value, depth = pending.pop()
        if depth > MAX_DEPTH:
            return UnreadableError("too_deep", f"The call's JSON is nested more than {MAX_DEPTH} deep.")
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, list):
            pending += [(item, depth + 1) for item in value]
        elif isinstance(value, dict):
            texts += value
            pending += [(item, depth + 1) for item in value.values()]
        elif isinstance(value, float) and not math.isfinite(value):
            return UnreadableError("invalid_json", "The call is not valid JSON: a number is NaN, infinite or too large.")
    if any("\ud800" <= character <= "\udfff" for text in texts for character in text):
        return UnreadableError("invalid_unicode", "The call holds half of a surrogate pair, which is no character.")
    return name, arguments


def skip_whitespace(text: str, position: int) -> int:
    """The first position from `position` on that holds no JSON whitespace."""
    while position < len(text) and text[position] in WHITESPACE:
        position += 1
    return position


def kind(value: Any) -> str:
    """What JSON calls a value."""
    kinds = {list: "array", str: "string", bool: "boolean", int: "number", float: "number", dict: "object", type(None): "null"}
    return kinds[type(value)]


def _whole(literal: str) -> int | float:
    """Infinity where the number has too many digits; `checked_arguments` refuses it."""
    return int(literal) if len(literal) <= MAX_DIGITS else math.inf


# Not strict: models write real line breaks inside strings, and what they mean is clear.
_DECODER = json.JSONDecoder(strict=False, parse_int=_whole)
