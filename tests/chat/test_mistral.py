"""Mistral's two formats and its reasoning."""

import pytest

from psrl.chat.parsers import MistralFormat
from psrl.types import ToolCall, ToolCallError

MISTRAL = MistralFormat()


def summary(text):
    parsed = MISTRAL.parse(text, turn=0)
    return parsed.content, [call.cause if isinstance(call, ToolCallError) else (call.name, call.arguments) for call in parsed.calls]


@pytest.mark.parametrize(
    "text",
    [
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]',
        '[TOOL_CALLS] [ {"name": "f", "arguments": {"a": "]"}} , {"arguments": {}, "name": "g", "id": "x"} ]',
        '[TOOL_CALLS]f[ARGS]{"a": "]"}[TOOL_CALLS]g[ARGS]{}',
        '[TOOL_CALLS]f[CALL_ID]abc123XYZ[ARGS]{"a": "]"}[TOOL_CALLS]g[CALL_ID]abc123XY0[ARGS]{}',
        '[TOOL_CALLS]f[ARGS] {"a": "]"}\n[TOOL_CALLS] g [ARGS]{}\n',
    ],
)
def test_both_formats_are_read(text):
    assert summary(text) == ("", [("f", {"a": "]"}), ("g", {})])
    assert summary("First.\n" + text) == ("First.", [("f", {"a": "]"}), ("g", {})])


@pytest.mark.parametrize(
    ("text", "causes"),
    [
        ("[TOOL_CALLS]", ["missing_name"]),
        ("[TOOL_CALLS][]", ["empty"]),
        ("[TOOL_CALLS][", ["invalid_json"]),
        ("[TOOL_CALLS]hello", ["missing_name"]),
        ("[TOOL_CALLS]f[ARGS]", ["invalid_json"]),
        ('[TOOL_CALLS]f[ARGS]{"a": }', ["invalid_json"]),
        ("[TOOL_CALLS]f[ARGS][1]", ["arguments_not_object"]),
        ('[TOOL_CALLS]f[ARGS]{"a": "\\udc00"}', ["invalid_unicode"]),
        ("[TOOL_CALLS][5, 6]", ["not_an_object", "not_an_object"]),
        ('[TOOL_CALLS][{"arguments": {}}]', ["missing_name"]),
        ('[TOOL_CALLS][{"name": "f", "arguments": "x"}]', ["arguments_not_object"]),
        ("[TOOL_CALLS][TOOL_CALLS]", ["missing_name", "missing_name"]),
    ],
)
def test_each_way_to_break_a_call_has_its_cause(text, causes):
    assert summary(text) == ("", causes)


def test_a_broken_call_in_a_list_is_answered_at_its_position():
    text = '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"code": }}, {"name": "h", "arguments": {}}]'
    first, error, last = MISTRAL.parse(text, turn=0).calls
    assert (first, last) == (ToolCall(id="call-0-0", name="f", arguments={}), ToolCall(id="call-0-2", name="h", arguments={}))
    assert error.cause == "invalid_json"
    assert error.written.startswith('{"name": "g"')


@pytest.mark.parametrize("rest", [",]", ",", ", ", "", "] ", ' ,\n[TOOL_CALLS]f[ARGS]{"a": 1}'])
def test_a_list_that_was_not_closed_well_gives_its_calls_all_the_same(rest):
    calls = summary('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}' + rest)[1]
    assert calls == [("f", {"a": 1})] * (1 + rest.count("ARGS"))


def test_a_list_that_was_cut_gives_its_whole_calls_and_one_error():
    assert summary('[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "argu')[1] == [("f", {}), "invalid_json"]


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("[THINK]add[/THINK]5", False, ("add", "5")),
        ("add[/THINK]5", True, ("add", "5")),
        ("[THINK]cut", False, ("cut", "")),
        ("<think>\nadd\n</think>\n5", False, ("add", "5")),
        ("<think>not [THINK]</think>5", False, ("not [THINK]", "5")),
        ("5", False, (None, "5")),
    ],
)
def test_reasoning_stands_in_mistrals_tags_or_the_common_ones(text, is_open, expected):
    assert MISTRAL.split_reasoning(text, is_open=is_open) == expected
