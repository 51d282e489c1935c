"""The Hermes scanner: whatever code a call holds is read exactly, and whatever is broken is answered in order."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.chat.parsers import HermesFormat, call_id, split_reasoning
from psrl.types import ToolCall, ToolCallError, ToolSchema

HERMES = HermesFormat()
FUZZ = settings(max_examples=100, deadline=None)
TAGS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    '"',
    "\\",
    "{",
    "}",
    "\n",
    '{"name": "f", "arguments": {}}',
    "'''",
    "[",
    ",",
    ":",
]
HOSTILE = st.lists(st.sampled_from(TAGS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=14).map("".join)
PROSE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<\n"), max_size=12)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False) | HOSTILE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(HOSTILE, inner, max_size=3),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(HOSTILE, JSON_VALUES, max_size=3)


def written(name, arguments, *, indent=None, ascii_only=False):
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, indent=indent, ensure_ascii=ascii_only) + "\n</tool_call>"


def one(text):
    parsed = HERMES.parse(text, turn=0)
    assert len(parsed.calls) == 1, parsed
    return parsed.calls[0]


@FUZZ
@given(
    calls=st.lists(st.tuples(st.text(min_size=1, max_size=8).filter(str.isprintable), ARGUMENTS), min_size=1, max_size=4),
    prose=PROSE,
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
)
def test_calls_with_any_text_in_their_strings_are_read_exactly(calls, prose, indent, ascii_only):
    text = prose + "\n" + "\n".join(written(name, arguments, indent=indent, ascii_only=ascii_only) for name, arguments in calls)
    parsed = HERMES.parse(text, turn=7)
    assert parsed.calls == tuple(ToolCall(id=f"call-7-{i}", name=name, arguments=arguments) for i, (name, arguments) in enumerate(calls))
    assert parsed.content == prose


@FUZZ
@given(text=HOSTILE, turn=st.integers(0, 9))
def test_no_text_makes_the_scanner_raise_or_skip_a_number(text, turn):
    parsed = HERMES.parse(text, turn=turn)
    assert [call.id for call in parsed.calls] == [call_id(turn, position) for position in range(len(parsed.calls))]
    assert bool(parsed.calls) == ("<tool_call>" in text)
    assert "<tool_call>" not in parsed.content
    assert all(call.message for call in parsed.calls if isinstance(call, ToolCallError))


@FUZZ
@given(
    before=ARGUMENTS,
    after=ARGUMENTS,
    broken=st.sampled_from(['{"name": "f", "arguments": {"code": }}', "not json", '{"name": "f" "x"}', "[}", '"']),
)
def test_a_broken_call_between_two_good_ones_is_answered_at_its_position(before, after, broken):
    text = written("first", before) + f"\n<tool_call>\n{broken}\n</tool_call>\n" + written("last", after)
    first, error, last = HERMES.parse(text, turn=0).calls
    assert first == ToolCall(id="call-0-0", name="first", arguments=before)
    assert (error.id, error.cause) == ("call-0-1", "invalid_json")
    assert last == ToolCall(id="call-0-2", name="last", arguments=after)


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ('{"name": "f", "arguments": {"a": 1}', "invalid_json"),
        ("{'name': 'f'}", "invalid_json"),
        ('{"name": "f", "arguments": {}} extra', "invalid_json"),
        ('{"name": "f", "arguments": {}}}', "invalid_json"),
        ('{"name": "f", "arguments": {"a": NaN}}', "invalid_json"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "invalid_json"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "invalid_json"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "invalid_unicode"),
        ("[" * 100_000, "too_deep"),
        ('{"name": "f", "arguments": {"a": ' + "[" * 100 + "]" * 100 + "}}", "too_deep"),
        ('["f", {}]', "not_an_object"),
        ("5", "not_an_object"),
        ('{"arguments": {}}', "missing_name"),
        ('{"name": "", "arguments": {}}', "missing_name"),
        ('{"name": 5, "arguments": {}}', "missing_name"),
        ('{"name": "f", "arguments": "print(1)"}', "arguments_not_object"),
        ('{"name": "f", "arguments": null}', "arguments_not_object"),
        ("", "empty"),
    ],
)
def test_each_way_to_break_a_call_has_its_cause(body, cause):
    call = one(f"<tool_call>\n{body}\n</tool_call>")
    assert isinstance(call, ToolCallError)
    assert call.cause == cause


@pytest.mark.parametrize(
    "text", ["<tool_call>", '<tool_call>{"name": "f", "arguments": {}}', '<tool_call>{"name": "f", "arguments": {"a": "x</tool_call>']
)
def test_a_call_that_never_ends_is_not_run(text):
    assert isinstance(one(text), ToolCallError)


def test_a_call_that_was_never_closed_does_not_swallow_the_next_one():
    error, good = HERMES.parse('<tool_call>{"name": "f", "arguments": {}}\n' + written("g", {}), turn=0).calls
    assert error.cause == "unclosed"
    assert good == ToolCall(id="call-0-1", name="g", arguments={})


def test_a_quote_that_is_never_closed_does_not_hide_the_next_call():
    error, good = HERMES.parse('<tool_call>\n{"name": "f}\n</tool_call>\n' + written("g", {"a": "b"}), turn=0).calls
    assert error.cause == "invalid_json"
    assert good == ToolCall(id="call-0-1", name="g", arguments={"a": "b"})


def test_a_call_inside_the_code_of_a_broken_call_is_not_run():
    inner = json.dumps(written("delete_everything", {}))
    call = one('<tool_call>\n{"name": "f", "arguments": {"code": ' + inner + "}\n</tool_call>")
    assert call.cause == "invalid_json"


def test_real_line_breaks_inside_a_string_are_what_they_look_like():
    call = one('<tool_call>\n{"name": "f", "arguments": {"code": "a = 1\nprint(a)\t"}}\n</tool_call>')
    assert call == ToolCall(id="call-0-0", name="f", arguments={"code": "a = 1\nprint(a)\t"})


def test_a_call_without_arguments_has_none():
    assert one('<tool_call>{"name": "f"}</tool_call>') == ToolCall(id="call-0-0", name="f", arguments={})


def test_text_without_calls_is_kept_to_the_last_space():
    assert HERMES.parse("  5 </tool_call>\n", turn=0).content == "  5 </tool_call>\n"


def test_the_error_says_where_and_how_to_write_it():
    assert "at character 13" in one('<tool_call>\n{"name": "f" "x"}\n</tool_call>').message
    assert '"arguments": <args-json-object>' in one("<tool_call>\n[]\n</tool_call>").message


@FUZZ
@given(arguments=ARGUMENTS)
def test_what_the_format_writes_it_reads(arguments):
    assert one(HERMES.call_text("f", arguments)) == ToolCall(id="call-0-0", name="f", arguments=arguments)


def test_the_system_text_is_qwens():
    schema = ToolSchema(name="f", description="d", parameters={"type": "object"})
    listed = '<tools>\n{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}\n</tools>'
    assert listed in HERMES.system_text([schema])


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("5", False, (None, "5")),
        ("<think>\nadd\n</think>\n\n5", False, ("add", "5")),
        ("\n<think>\n\n</think>\n\n5", False, ("", "5")),
        ("<think>never closed", False, ("never closed", "")),
        ("add\n</think>\n5", True, ("add", "5")),
        ("<think>add</think>5", True, ("add", "5")),
        ("cut while thinking", True, ("cut while thinking", "")),
        ("5 <think>late</think>", False, (None, "5 <think>late</think>")),
        ("no reasoning</think>5", False, (None, "no reasoning</think>5")),
    ],
)
def test_reasoning_is_what_stands_in_think_tags_at_the_start(text, is_open, expected):
    assert split_reasoning(text, is_open=is_open) == expected
