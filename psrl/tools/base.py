"""Tools from plain Python functions: the JSON schema comes from signature and docstring, arguments are checked by type.

`@tool` above a function makes a `FunctionTool` and registers it. What the policy got wrong (a missing name, a wrong type) becomes an
observation that says what is expected; it never raises.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import time
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from psrl.errors import ConfigError, ToolError
from psrl.protocols import Tool, ToolResult
from psrl.registry import Registry
from psrl.types import ToolSchema

tools = Registry[Any]("tool", key="rollout.multi_turn.tool_config_path")
"""Tool classes and decorated functions by name."""

DEFAULT_TIMEOUT_S = 30.0
JSON_TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,), "object": (dict,),
    "null": (type(None),),
}  # fmt: skip
ARGUMENT_LINE = re.compile(r"^\s+(\w+)(?: \([^)]*\))?: (.+)$")


class FunctionTool(Tool):
    """A Python function, plain or async, that the policy may call. Plain ones run in a thread, which goes on after a time-out."""

    def __init__(self, function: Callable[..., Any], *, name: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """The function's result is shown by `str`; ToolError raised by it is an observation, any other exception is the programmer's."""
        self._function = function
        self._timeout_s = timeout_s
        self._schema = schema_of(function, name=name)
        self.__name__ = self.__qualname__ = name
        self.__module__ = function.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The undecorated function."""
        return self._function(*args, **kwargs)

    @property
    def schema(self) -> ToolSchema:
        """As read from the signature."""
        return self._schema

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Check the arguments, then run the function within its time."""
        problem = problem_with(arguments, self._schema.parameters)
        if problem is not None:
            return ToolResult(text=problem, error_cause="bad_arguments")
        started = time.monotonic()
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                if inspect.iscoroutinefunction(self._function):
                    value = await self._function(**arguments)
                else:
                    value = await asyncio.to_thread(self._function, **arguments)
        except ToolError as error:
            return ToolResult(text=f"Error: {error}", error_cause="tool_error", run_s=time.monotonic() - started)
        except TimeoutError:
            if not deadline.expired():  # the function's own, such as that of a connection
                raise
            text = f"Error: {self._schema.name} did not answer within {self._timeout_s:g} s"
            return ToolResult(text=text, error_cause="timeout", run_s=time.monotonic() - started)
        return ToolResult(text=str(value), run_s=time.monotonic() - started)

    async def close(self) -> None:
        """Nothing is held."""


@typing.overload
def tool(function: Callable[..., Any], /) -> FunctionTool: ...
@typing.overload
def tool(*, name: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(function: Any = None, /, *, name: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
    """Make a function a tool and register it under its name, as `@tool` or `@tool(name=..., timeout_s=...)`.

    Example:
        @tool
        def add(a: int, b: int = 1) -> int:
            \"\"\"Add two numbers.

            Args:
                a: The first.
                b: The second.
            \"\"\"
            return a + b
    """

    def decorate(plain: Callable[..., Any]) -> FunctionTool:
        made = FunctionTool(plain, name=name or plain.__name__, timeout_s=timeout_s)
        tools.register(made.schema.name)(made)
        return made

    return decorate if function is None else decorate(function)


def schema_of(function: Callable[..., Any], *, name: str) -> ToolSchema:
    """What the model is told about a function.

    Raises:
        ConfigError: A parameter has no type, or one that JSON cannot carry; or there is no docstring.
    """
    text = inspect.getdoc(function)
    if not text:
        raise ConfigError(key="tools", value=name, rule="the model is told nothing about this function", fix="give it a docstring")
    description, _, argument_text = text.partition("\nArgs:\n")
    descriptions = {match[1]: match[2] for line in argument_text.splitlines() if (match := ARGUMENT_LINE.match(line))}
    hints = typing.get_type_hints(function)
    properties: dict[str, Any] = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in hints or parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(key="tools", value=f"{name}({parameter})", rule="every parameter is named and typed", fix="annotate it")
        properties[parameter.name] = _json_type(hints[parameter.name], where=f"{name}({parameter})")
        if parameter.name in descriptions:
            properties[parameter.name]["description"] = descriptions[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    return ToolSchema(
        name=name,
        description=description.strip(),
        parameters={"type": "object", "properties": properties, "required": required},
    )


def _json_type(hint: Any, *, where: str) -> dict[str, Any]:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint in JSON_TYPES:
        return {"type": JSON_TYPES[hint]}
    if origin is list and len(args) == 1:
        return {"type": "array", "items": _json_type(args[0], where=where)}
    if origin is dict:
        return {"type": "object"}
    if origin is typing.Literal and all(isinstance(choice, str) for choice in args):
        return {"type": "string", "enum": list(args)}
    if origin in (typing.Union, types.UnionType) and len(args) == 2 and type(None) in args:
        inner = _json_type(next(arg for arg in args if arg is not type(None)), where=where)
        return {**inner, "type": [inner["type"], "null"]}
    raise ConfigError(
        key="tools", value=where, rule=f"{hint} has no JSON type here", fix="use str, int, float, bool, list[T], dict, Literal of strings"
    )


def problem_with(arguments: Mapping[str, Any], parameters: Mapping[str, Any]) -> str | None:
    """What is wrong with the arguments of a call, for the model to read; None when they fit the schema."""
    if not isinstance(arguments, Mapping):
        return f"Error: arguments must be a JSON object, got {type(arguments).__name__}"
    properties: Mapping[str, Any] = parameters.get("properties", {})
    required: Sequence[str] = parameters.get("required", ())
    problems = [f"missing argument {name!r}" for name in required if name not in arguments]
    for name, value in arguments.items():
        if name not in properties:
            problems.append(f"unknown argument {name!r}")
            continue
        problem = _value_problem(value, properties[name])
        if problem is not None:
            problems.append(f"argument {name!r} {problem}")
    if not problems:
        return None
    expected = ", ".join(f"{name}: {_type_words(spec)}" for name, spec in properties.items()) or "no arguments"
    return f"Error: {'; '.join(problems)}. Expected {{{expected}}}"


def _type_words(spec: Mapping[str, Any]) -> str:
    kind = spec.get("type", "any")
    return kind if isinstance(kind, str) else " or ".join(kind)


def _value_problem(value: Any, spec: Mapping[str, Any]) -> str | None:
    if "type" in spec:
        kinds = [spec["type"]] if isinstance(spec["type"], str) else list(spec["type"])
        allowed = tuple(python for kind in kinds for python in PYTHON_TYPES[kind])
        # JSON's true is no number, though Python's is.
        if not isinstance(value, allowed) or (isinstance(value, bool) and "boolean" not in kinds):
            return f"must be {_type_words(spec)}, got {type(value).__name__}"
    if "enum" in spec and value is not None and value not in spec["enum"]:
        return f"must be one of {', '.join(map(repr, spec['enum']))}"
    if "items" in spec and isinstance(value, list):
        return next((f"item {i} {problem}" for i, item in enumerate(value) if (problem := _value_problem(item, spec["items"]))), None)
    return None
