"""Fields of a request's JSON: each is read as what it must be, or refused with its path.

Invariant: what comes out can be rendered. Texts are encodable, objects can be written as JSON again, a conversation ends where the policy
is to speak.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

from psrl.errors import SessionRequestError
from psrl.types import Message, Role, ToolCall, ToolSchema

MAX_DEPTH = 100
"""Of objects: deeper ones would exhaust the stack of whoever writes them again."""
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Use(StrEnum):
    """What becomes of a parameter of an API."""

    READ = "read"
    SAMPLING = "sampling"
    """Asks for another distribution: handed to the session's sampling contract, which overrides or refuses it."""
    IGNORED = "ignored"
    """Cannot change what is sampled."""
    FIXED = "fixed"
    """Refused but for values that say what its absence says."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an API; null is its absence."""

    use: Use
    neutral: tuple[Any, ...] = ()
    """Values that say what absence says."""
    kinds: tuple[type, ...] = ()
    """Of SAMPLING: JSON's types of it; empty leaves them unchecked."""


NUMBER = (int, float)
READ = Parameter(Use.READ)
IGNORED = Parameter(Use.IGNORED)
REFUSED = Parameter(Use.FIXED)


def refuse(param: str, message: str, *, code: str = "invalid_value") -> NoReturn:
    """A wrong value."""
    raise SessionRequestError(status=400, code=code, message=message, param=param)


def unsupported(param: str, message: str) -> NoReturn:
    """A value that the API knows and sessions do not."""
    refuse(param, message, code="unsupported_value")


def read_parameters(body: Any, parameters: Mapping[str, Parameter]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields that are there, what is asked of sampling). Refuses unknown names, and FIXED ones that are not neutral."""
    fields = {name: value for name, value in object_of(body, "body").items() if value is not None}
    asked: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in parameters:
            refuse(name, f"unknown parameter {name!r}", code="unknown_parameter")
        parameter = parameters[name]
        if any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in parameter.neutral):
            continue
        if parameter.use is Use.FIXED:
            allowed = f": only {json.dumps(parameter.neutral[0])} is" if parameter.neutral else ""
            refuse(name, f"{name} is not supported{allowed}", code="unsupported_parameter")
        if parameter.use is Use.SAMPLING:
            if parameter.kinds and (not isinstance(value, parameter.kinds) or (isinstance(value, bool) and bool not in parameter.kinds)):
                refuse(name, f"{name} has the wrong type: {_kind(value)}")
            asked[name] = value
    return fields, asked


def required(fields: Mapping[str, Any], name: str, param: str = "") -> Any:
    """A field that must be there and not null."""
    if fields.get(name) is None:
        refuse(param or name, f"{param or name} is required", code="missing_required_parameter")
    return fields[name]


def text_of(value: Any, param: str) -> str:
    """A text that can be encoded."""
    if not isinstance(value, str):
        refuse(param, f"{param} must be text, not {_kind(value)}")
    if _LONE_SURROGATE.search(value):
        refuse(param, f"{param} holds half of a surrogate pair, which is no character")
    return value


def name_of(value: Any, param: str) -> str:
    """A text that is not empty."""
    return text_of(value, param) or refuse(param, f"{param} is empty")


def object_of(value: Any, param: str) -> dict[str, Any]:
    """An object."""
    if not isinstance(value, dict):
        refuse(param, f"{param} must be an object, not {_kind(value)}")
    return value


def list_of(value: Any, param: str) -> list[Any]:
    """A list."""
    if not isinstance(value, list):
        refuse(param, f"{param} must be a list, not {_kind(value)}")
    return value


def choice_of(value: Any, param: str, choices: Collection[str]) -> str:
    """One of a few words."""
    if not isinstance(value, str) or value not in choices:
        refuse(param, f"{param} is none of {', '.join(choices)}: {value!r:.80}")
    return value


def flag_of(fields: Mapping[str, Any], name: str, param: str = "") -> bool:
    """A boolean, false where it is absent."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        refuse(param or name, f"{param or name} must be true or false, not {_kind(value)}")
    return bool(value)


def positive_of(fields: Mapping[str, Any], name: str) -> int | None:
    """A whole number above zero, or None where it is absent."""
    value = fields.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        refuse(name, f"{name} must be a whole number above 0, not {value!r:.40}")
    return value


def stop_texts(value: Any, param: str, *, most: int | None = None) -> tuple[str, ...]:
    """Texts that end the turn; `value` may be one text or None."""
    if value is None:
        return ()
    texts = [value] if isinstance(value, str) else list_of(value, param)
    if most is not None and len(texts) > most:
        refuse(param, f"{param} holds more than {most} texts")
    return tuple(name_of(text, param) for text in texts)


def content_text(value: Any, param: str, *, kinds: Collection[str]) -> str:
    """The text of a content: text itself, or parts of `kinds`, with nothing put between them."""
    if isinstance(value, str):
        return text_of(value, param)
    if not isinstance(value, list):
        refuse(param, f"{param} must be text or a list of parts, not {_kind(value)}")
    return "".join(part_text(part, f"{param}[{index}]", kinds=kinds) for index, part in enumerate(value))


def part_text(part: Any, param: str, *, kinds: Collection[str]) -> str:
    """The text of one content part; any other part is refused by its kind."""
    kind = required(object_of(part, param), "type", f"{param}.type")
    if not isinstance(kind, str) or kind not in kinds:
        unsupported(param, f"{param} is of type {kind!r:.40}: only {', '.join(kinds)} can be read")
    return text_of(required(part, "text", f"{param}.text"), f"{param}.text")


def json_object(value: Any, param: str) -> dict[str, Any]:
    """An object that can be written as JSON again, without lone surrogates, NaN or endless depth."""
    whole = object_of(value, param)
    pending: list[tuple[Any, int]] = [(whole, 1)]
    while pending:
        part, depth = pending.pop()
        if depth > MAX_DEPTH:
            refuse(param, f"{param} is nested more than {MAX_DEPTH} deep")
        inner: Iterable[Any] = [*part, *part.values()] if isinstance(part, dict) else part if isinstance(part, list) else ()
        pending += [(item, depth + 1) for item in inner]
    try:
        json.dumps(whole, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:
        refuse(param, f"{param} cannot be written as JSON: {error}")
    return whole


def arguments_of(value: Any, param: str) -> dict[str, Any]:
    """A call's arguments from their JSON text; empty text is no arguments.

    Answers always hold an object, so what is refused here was never an answer.
    """
    text = text_of(value, param)
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        refuse(param, f"{param} is not the JSON text of an object: {error}")
    return json_object(arguments, param)


def json_text(value: Any) -> str:
    """A call's arguments as the text that `arguments_of` reads."""
    return json.dumps(value, ensure_ascii=False)


def tool_of(raw: Mapping[str, Any], param: str, *, schema: str) -> ToolSchema:
    """A function's schema; its parameters stand in the field `schema`."""
    parameters = raw.get(schema)
    description = raw.get("description")
    return ToolSchema(
        name=name_of(required(raw, "name", f"{param}.name"), f"{param}.name"),
        description="" if description is None else text_of(description, f"{param}.description"),
        parameters={"type": "object", "properties": {}} if parameters is None else json_object(parameters, f"{param}.{schema}"),
    )


def distinct_tools(tools: Iterable[ToolSchema]) -> tuple[ToolSchema, ...]:
    """The tools, no two of one name."""
    by_name: dict[str, ToolSchema] = {}
    for tool in tools:
        if tool.name in by_name:
            refuse("tools", f"two tools are named {tool.name!r}")
        by_name[tool.name] = tool
    return tuple(by_name.values())


class ReadBefore:
    """The messages of a session's last request: what the next one shares with it, from the first message on, is not read again."""

    def __init__(self) -> None:
        self._raw: list[Any] = []
        self._read: list[tuple[Message, ...]] = []

    def read(self, raw: list[Any], read_one: Callable[[Any, int], Sequence[Message]]) -> list[Message]:
        """The messages of every entry of `raw`; `read_one` gets an entry and its index."""
        num_same = 0
        for before, now in zip(self._raw, raw, strict=False):
            if before != now:
                break
            num_same += 1
        read = self._read[:num_same]
        messages = [message for one in read for message in one]
        for index in range(num_same, len(raw)):
            one = tuple(_named(message, messages) for message in read_one(raw[index], index))
            read.append(one)
            messages += one
        self._raw, self._read = raw, read
        return messages


def _named(message: Message, before: Sequence[Message]) -> Message:
    """A tool's answer with the name of the call that it answers."""
    if message.role is not Role.TOOL or message.name is not None:
        return message
    calls = (call for earlier in reversed(before) for call in earlier.tool_calls if call.id == message.tool_call_id)
    call = next(calls, None)
    return message if call is None else dataclasses.replace(message, name=call.name)


def conversation_of(messages: Sequence[Message], param: str) -> tuple[Message, ...]:
    """The messages, if the policy is to speak next."""
    if not messages:
        refuse(param, f"{param} is empty")
    if messages[-1].role is Role.ASSISTANT:
        unsupported(param, "the last message is the assistant's: a turn that the agent has begun cannot be continued")
    return tuple(messages)


def call_of(identity: Any, name: Any, arguments: dict[str, Any], param: str, *, id_field: str = "id", name_field: str = "name") -> ToolCall:
    """A call that an assistant's message echoes."""
    return ToolCall(id=name_of(identity, f"{param}.{id_field}"), name=name_of(name, f"{param}.{name_field}"), arguments=arguments)


def _kind(value: Any) -> str:
    kinds = {list: "a list", str: "text", bool: "a boolean", int: "a number", float: "a number", dict: "an object", type(None): "null"}
    return kinds[type(value)]
