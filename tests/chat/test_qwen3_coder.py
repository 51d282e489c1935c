"""Qwen3-Coder's XML: values are text that may hold the format's own tags, and schemas say what type they have."""

import pytest

from psrl.chat.parsers import Qwen3CoderFormat
from psrl.types import ToolCall, ToolCallError, ToolSchema

XML = Qwen3CoderFormat()
TOOL = ToolSchema(
    name="f",
    description="",
    parameters={
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "n": {"type": "integer"},
            "x": {"type": "number"},
            "flag": {"type": "boolean"},
            "items": {"type": "array"},
            "object": {"type": "object"},
            "maybe": {"type": ["integer", "null"]},
            "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "anything": {},
        },
    },
)


def call_with(key, value):
    return f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"


def one(text, tools=(TOOL,)):
    parsed = XML.parse(text, turn=0, tools=tools)
    assert len(parsed.calls) == 1, parsed
    return parsed.calls[0]


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("text", "5", "5"),
        ("text", " a\n  b ", " a\n  b "),
        ("text", "", ""),
        ("text", "null", "null"),
        ("n", "5", 5),
        ("n", " 5\n", 5),
        ("x", "2.5", 2.5),
        ("flag", "true", True),
        ("flag", "True", True),
        ("flag", "False", False),
        ("items", '[1, "a"]', [1, "a"]),
        ("object", '{"a": "line\nbreak"}', {"a": "line\nbreak"}),
        ("maybe", "None", None),
        ("maybe", "null", None),
        ("maybe", "7", 7),
        ("either", "null", None),
        ("either", "7", "7"),
        ("anything", "7", "7"),
        ("unknown", "7", "7"),
    ],
)
def test_a_value_has_the_type_of_its_schema(key, written, value):
    assert one(call_with(key, written)).arguments == {key: value}
    assert type(one(call_with(key, written)).arguments[key]) is type(value)


def test_values_of_an_unknown_tool_stay_text():
    assert one(call_with("n", "5"), tools=()).arguments == {"n": "5"}


@pytest.mark.parametrize(
    ("key", "written"), [("n", "five"), ("x", "1,5"), ("flag", "yes"), ("items", "[1"), ("object", "{'a': 1}"), ("n", "")]
)
def test_a_value_that_is_not_of_its_type_is_an_error_that_names_it(key, written):
    error = one(call_with(key, written))
    assert isinstance(error, ToolCallError)
    assert error.cause == "invalid_json"
    assert repr(key) in error.message
    assert error.written == call_with(key, written)


@pytest.mark.parametrize(
    "code",
    [
        "print('</parameter>')",
        "x = '</parameter></function></tool_call>'",
        "</parameter>",
        "</function>\n</tool_call>",
        "<tool_call>",
        "a <parameter=b> c",
        "s = '</parameter>\\n</function>\\n</tool_call>'",
        "<parameter=text>\nx",
        "\n\n  indented\n\n",
        "\r\n",
    ],
)
def test_code_that_holds_tags_of_the_format_is_read_exactly(code):
    text = "Now:\n" + call_with("text", code) + "\n" + call_with("n", "5")
    assert [call.arguments for call in XML.parse(text, turn=0, tools=[TOOL]).calls] == [{"text": code}, {"n": 5}]


def test_a_value_on_one_line_needs_no_line_breaks():
    text = "<tool_call><function=f><parameter=text>a b</parameter><parameter=n>5</parameter></function></tool_call>"
    assert one(text) == ToolCall(id="call-0-0", name="f", arguments={"text": "a b", "n": 5})


def test_a_call_whose_opening_tag_was_forgotten_is_read():
    parsed = XML.parse("Now:\n<function=f>\n<parameter=n>\n5\n</parameter>\n</function>\n</tool_call>\nDone.", turn=0, tools=[TOOL])
    assert parsed.calls == (ToolCall(id="call-0-0", name="f", arguments={"n": 5}),)
    assert parsed.content == "Now:\nDone."


def test_a_forgotten_end_of_a_value_does_not_swallow_the_next_call():
    broken = "<tool_call>\n<function=f>\n<parameter=text>\nx\n</function>\n</tool_call>"
    error, good = XML.parse(f"{broken}\n{call_with('n', '5')}", turn=0, tools=[TOOL]).calls
    assert (error.cause, error.written) == ("unclosed", broken)
    assert good == ToolCall(id="call-0-1", name="f", arguments={"n": 5})


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("<tool_call>\n</tool_call>", "empty"),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', "missing_name"),
        ("<tool_call>\n<function=>\n</function>\n</tool_call>", "missing_name"),
        ("<tool_call>", "missing_name"),
        ("<tool_call>\n<function=f>", "unclosed"),
        ("<tool_call>\n<function=f>\n</function>", "unclosed"),
        ("<tool_call>\n<function=f>\n<parameter=text>\nx", "unclosed"),
        ("<tool_call>\n<function=f>\n<parameter=text>\nx\n</function>\n</tool_call>", "unclosed"),
        ("<tool_call>\n<function=f>\nhello\n</function>\n</tool_call>", "invalid_xml"),
        (call_with("n", "[" * 5000), "too_deep"),
        (call_with("items", "[" * 100 + "]" * 100), "too_deep"),
        (call_with("x", "NaN"), "invalid_json"),
        (call_with("text", "\ud800"), "invalid_unicode"),
        (call_with("n", "5").replace("</function>", "<parameter=n>\n6\n</parameter>\n</function>"), "duplicate_parameter"),
    ],
)
def test_each_way_to_break_a_call_has_its_cause(text, cause):
    error = one(text)
    assert isinstance(error, ToolCallError)
    assert (error.cause, error.written) == (cause, text)
