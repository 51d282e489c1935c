"""Tools from functions, groups of tools, and the interpreter tool over a real interpreter."""

import asyncio
from typing import Literal

import pytest

from psrl.config.sandbox import SandboxConfig
from psrl.errors import ConfigError, ToolError
from psrl.protocols import Tool
from psrl.sandbox import build_interpreter
from psrl.tools import CodeInterpreter, FunctionTool, tool, tools


@tool
def scale(value: float, factor: int = 2, *, unit: Literal["m", "km"] = "m", notes: list[str] | None = None) -> str:
    """Multiply a length.

    Args:
        value: The length.
        factor: By how much.
    """
    if value < 0:
        raise ToolError("a length is not negative")
    return f"{value * factor:g} {unit} {notes}"


@tool(name="wait_for_ever", timeout_s=0.1)
async def wait_for_ever() -> None:
    """Never answer."""
    await asyncio.Event().wait()


@tool
def unreachable() -> None:
    """Connect to nowhere."""
    raise TimeoutError("no connection")


def call(member, **arguments):
    return asyncio.run(member.call(arguments))


def test_a_functions_schema_comes_from_its_signature_and_docstring():
    assert isinstance(scale, Tool)
    assert scale.schema.name == "scale"
    assert scale.schema.description == "Multiply a length."
    assert scale.schema.parameters == {
        "type": "object",
        "properties": {
            "value": {"type": "number", "description": "The length."},
            "factor": {"type": "integer", "description": "By how much."},
            "unit": {"type": "string", "enum": ["m", "km"]},
            "notes": {"type": ["array", "null"], "items": {"type": "string"}},
        },
        "required": ["value"],
    }


def test_a_decorated_function_is_registered_and_still_a_function():
    assert tools.resolve("scale") is scale
    assert scale(1.5) == "3 m None"


def test_a_right_call_gives_the_functions_result_as_text():
    result = call(scale, value=2, factor=3, unit="km", notes=["a"])
    assert (result.text, result.error_cause) == ("6 km ['a']", None)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({}, "missing argument 'value'"),
        ({"value": "2"}, "argument 'value' must be number, got str"),
        ({"value": True}, "argument 'value' must be number, got bool"),
        ({"value": 1, "factor": 1.5}, "argument 'factor' must be integer, got float"),
        ({"value": 1, "size": 1}, "unknown argument 'size'"),
        ({"value": 1, "unit": "mile"}, "argument 'unit' must be one of 'm', 'km'"),
        ({"value": 1, "notes": ["a", 1]}, "argument 'notes' item 1 must be string, got int"),
        ({"value": None}, "argument 'value' must be number, got NoneType"),
    ],
)
def test_wrong_arguments_are_answered_with_what_is_expected(arguments, part):
    result = call(scale, **arguments)
    assert result.error_cause == "bad_arguments"
    assert part in result.text
    assert "Expected {value: number, factor: integer, unit: string, notes: array or null}" in result.text


def test_a_refusal_and_a_time_out_are_observations():
    assert call(scale, value=-1).text == "Error: a length is not negative"
    assert call(scale, value=-1).error_cause == "tool_error"
    assert call(wait_for_ever).error_cause == "timeout"


def test_a_time_out_inside_a_function_is_not_taken_for_the_tools_own():
    with pytest.raises(TimeoutError, match="no connection"):
        call(unreachable)


def test_a_function_that_the_model_cannot_be_told_about_is_a_config_error():
    def silent(a: int) -> int:
        return a

    def untyped(a):
        """Say something."""
        return a

    def unsendable(a: bytes) -> bytes:
        """Say something."""
        return a

    for function in (silent, untyped, unsendable):
        with pytest.raises(ConfigError, match="Fix: "):
            FunctionTool(function, name=function.__name__)


def interpret(*all_arguments):
    """Results of code_interpreter calls in one interpreter."""

    async def play():
        interpreter = build_interpreter(SandboxConfig(num_workers=1, wall_s=1.0, output_kb=1), run="tools")
        code_interpreter = CodeInterpreter(interpreter)
        try:
            return [await code_interpreter.call(given) for given in all_arguments]
        finally:
            await interpreter.stop()

    return asyncio.run(play())


def test_the_interpreter_tool_shows_output_then_errors_and_names_their_cause():
    results = interpret(
        {"code": "print(2+3)"},
        {"code": "x = 1"},
        {"code": "print('before')\n1/0"},
        {"code": "while True: pass"},
        {"code": ["print(1)"]},
        {"program": "print(1)"},
        {"code": "import sys\nprint('out')\nprint('err', file=sys.stderr)"},
    )
    assert [result.error_cause for result in results] == [None, None, "exception", "timeout", "bad_arguments", "bad_arguments", None]
    assert results[0].text == "5"
    assert results[1].text == "(no output)"
    assert results[2].text.splitlines()[0] == "before"
    assert results[2].text.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert results[3].text.startswith("Error: the program ran out of time")
    assert "missing argument 'code'" in results[5].text
    assert results[6].text == "out\nerr"
    assert 1.0 <= results[3].run_s < 5
    assert results[3].queue_s < 0.5
