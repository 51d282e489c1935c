"""Llama 3.1's JSON calls: what is a call, what is ordinary JSON, and what was meant as a call."""

import pytest

from psrl.chat.parsers import Llama3JsonFormat
from psrl.types import ToolCall, ToolCallError

LLAMA = Llama3JsonFormat()
CALL = '{"name": "f", "parameters": {"a": 1}}'


def call(position, name="f", **arguments):
    return ToolCall(id=f"call-0-{position}", name=name, arguments=arguments)


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"\n\n{CALL}\n",
        f"<|python_tag|>{CALL}",
        f"<|python_tag|> {CALL};",
        '{"name": "f", "arguments": {"a": 1}}',
        '{"type": "function", "name": "f", "parameters": {"a": 1}}',
        '{\n  "name": "f",\n  "parameters": {"a": 1}\n}',
        '<|python_tag|>{"parameters": {"a": 1}, "name": "f"}',
    ],
)
def test_a_turn_that_is_a_call_is_one(text):
    parsed = LLAMA.parse(text, turn=0)
    assert parsed.calls == (call(0, a=1),)
    assert parsed.content == ""


@pytest.mark.parametrize("between", ["; ", ";", "\n", "\n\n", " ;\n", "", "<|python_tag|>"])
def test_several_calls_are_read_in_order(between):
    parsed = LLAMA.parse(CALL + between + '{"name": "g", "parameters": {}}', turn=0)
    assert parsed.calls == (call(0, a=1), call(1, "g"))
    assert parsed.content == ""


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "Ada", "age": 36}',
        '{"name": "Ada"}',
        '{"parameters": {"a": 1}}',
        '[{"name": "f", "parameters": {}}]',
        '{"calls": [\n  {"name": "f", "parameters": {}}\n]}',
        'It looks like {"name": "f", "parameters": {}}.',
        "{broken",
        "{",
        "",
    ],
)
def test_ordinary_text_and_json_is_content(text):
    parsed = LLAMA.parse(text, turn=0)
    assert (parsed.content, parsed.calls) == (text, ())


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ('{"name": "f", "parameters": {"code": }}', "invalid_json"),
        ('{"name": "f", "parameters": {"code": "x', "invalid_json"),
        ('{"name": "f", "parameters": ', "invalid_json"),
        ('{"name": "f", "parameters": "x"}', "arguments_not_object"),
        ('{"name": "", "parameters": {}}', "missing_name"),
        ('{"name": "f", "parameters": {"a": "\\ud800"}}', "invalid_unicode"),
        ('<|python_tag|>brave_search.call(query="x")', "invalid_json"),
        ("<|python_tag|>", "invalid_json"),
        ("<|python_tag|>[1]", "not_an_object"),
    ],
)
def test_what_was_meant_as_a_call_and_cannot_be_read_is_one_error(text, cause):
    (error,) = LLAMA.parse(text, turn=0).calls
    assert isinstance(error, ToolCallError)
    assert (error.cause, error.written) == (cause, text)


def test_prose_around_calls_is_content():
    parsed = LLAMA.parse(f"First.\n{CALL}\nThen.\n<|python_tag|>{CALL}\nLast.", turn=0)
    assert parsed.calls == (call(0, a=1), call(1, a=1))
    assert parsed.content == "First.\nThen.\nLast."
