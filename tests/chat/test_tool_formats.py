"""What holds for every tool-call format: exact reading of what it writes, one answer for each broken call, linear time."""

import time

import pytest
from formats_under_test import CLOSINGS, FORMATS, JUNK, MARKS, OPENINGS, PROSE, calls_of, expected, hostile, parse, written
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.chat.parsers import call_id, tool_formats
from psrl.errors import ConfigError
from psrl.types import ToolCall, ToolCallError, ToolSchema

FUZZ = settings(max_examples=15, deadline=None)
HOSTILE_LENGTH = 100_000
HOSTILE_LIMIT_S = 10
"""Several times what the slowest takes on two slow cores; a quadratic scanner takes minutes."""


def test_every_format_is_chosen_by_its_name():
    assert tool_formats.names == FORMATS
    with pytest.raises(ConfigError, match="hermes"):
        tool_formats.resolve("no_such")


@pytest.mark.parametrize("name", FORMATS)
@FUZZ
@given(data=st.data())
def test_calls_in_prose_and_in_a_row_are_read_exactly(name, data):
    calls = data.draw(calls_of(name, max_size=4))
    prose = data.draw(PROSE)
    text = prose + "\n" + "\n".join(written(name, calls))
    parsed = parse(name, text, calls, turn=7)
    assert parsed.calls == expected(calls, turn=7)
    assert parsed.content == prose


@pytest.mark.parametrize("name", FORMATS)
@FUZZ
@given(data=st.data())
def test_no_text_makes_a_parser_raise_or_skip_a_number(name, data):
    text = data.draw(hostile(name))
    tool_format = tool_formats.resolve(name)()
    _, rest = tool_format.split_reasoning(text, is_open=data.draw(st.booleans()))
    parsed = tool_format.parse(rest, turn=3)
    assert [call.id for call in parsed.calls] == [call_id(3, position) for position in range(len(parsed.calls))]
    errors = [call for call in parsed.calls if isinstance(call, ToolCallError)]
    assert all(call.message and call.cause and call.written and call.written in rest for call in errors)


@pytest.mark.parametrize("name", FORMATS)
@FUZZ
@given(data=st.data())
def test_a_mutation_loses_no_call_that_was_complete_before_it(name, data):
    calls = data.draw(calls_of(name, max_size=3))
    texts = written(name, calls)
    text = "\n".join(texts)
    position = data.draw(st.integers(0, len(text)))
    num_removed = data.draw(st.integers(0, 20))
    mutated = text[:position] + data.draw(hostile(name)) + text[position + num_removed :]
    ends = [sum(len(written) + 1 for written in texts[: index + 1]) for index in range(len(texts))]
    num_whole = sum(end <= position for end in ends)
    assert parse(name, mutated, calls).calls[:num_whole] == expected(calls)[:num_whole]


@pytest.mark.parametrize("name", FORMATS)
@FUZZ
@given(data=st.data())
def test_a_turn_that_was_cut_gives_whole_calls_or_errors_and_never_half_a_call(name, data):
    calls = data.draw(calls_of(name, max_size=3))
    text = "\n".join(written(name, calls))
    parsed = parse(name, text[: data.draw(st.integers(0, len(text)))], calls)
    read = [call for call in parsed.calls if isinstance(call, ToolCall)]
    assert tuple(read) == expected(calls)[: len(read)]


@pytest.mark.parametrize("name", FORMATS)
def test_a_broken_call_between_two_good_ones_is_answered_at_its_position(name):
    calls = [("first", {"a": "1"}), ("last", {"b": "2"})]
    first, last = written(name, calls)
    broken = first.replace('"1"', "").replace("</parameter>", "").replace("first", "broken")
    parsed = parse(name, f"{first}\n{broken}\n{last}", calls)
    assert [type(call) for call in parsed.calls] == [ToolCall, ToolCallError, ToolCall]
    error = parsed.calls[1]
    assert error.cause in ("invalid_json", "unclosed", "invalid_xml")
    assert error.written == broken
    assert [parsed.calls[0].arguments, parsed.calls[2].arguments] == [{"a": "1"}, {"b": "2"}]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize("junk", ["", "{", "[", "[{", '{"a": "', '"', '\\"', 'x"\\"', "1,"])
def test_a_hostile_text_is_read_in_linear_time(name, junk, is_closed):
    unit = OPENINGS[name] + junk + (CLOSINGS[name] if is_closed else "")
    text = (unit * (HOSTILE_LENGTH // len(unit) + 1))[:HOSTILE_LENGTH]
    begin = time.process_time()
    calls = parse(name, text).calls
    assert time.process_time() - begin < HOSTILE_LIMIT_S
    assert calls


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("space", [" ", "\n", "\n "])
def test_a_long_run_of_space_is_read_in_linear_time(name, space):
    marks = MARKS[name] + [CLOSINGS[name], written(name, [("f", {"a": 1})])[0]]
    text = "".join(mark + space * 10_000 for mark in marks)
    begin = time.process_time()
    parse(name, text)
    parse(name, text[::-1])
    assert time.process_time() - begin < HOSTILE_LIMIT_S / 5


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_any_repeated_text_is_read_in_linear_time(name, data):
    pieces = st.sampled_from(MARKS[name]) | st.sampled_from(JUNK)
    unit = "".join(data.draw(st.lists(pieces, min_size=2, max_size=7)))
    text = (unit * (20_000 // len(unit) + 1))[:20_000]
    begin = time.process_time()
    parse(name, text)
    assert time.process_time() - begin < HOSTILE_LIMIT_S / 5


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("nesting", ["[" * 50_000, '{"a":' * 20_000, '{"a": ' + "[" * 100 + "]" * 100 + "}"])
def test_deep_nesting_is_one_error(name, nesting):
    text = written(name, [("f", {"a": {}})])[0].replace('{"a": {}}', nesting).replace("{}", nesting)
    parsed = parse(name, text, [("f", {"a": {}})])
    assert [type(call) for call in parsed.calls] == [ToolCallError]
    assert parsed.calls[0].cause in ("too_deep", "unclosed")


@pytest.mark.parametrize("name", FORMATS)
def test_the_system_text_shows_the_tools_and_how_to_call_them(name):
    tool = ToolSchema(name="code_interpreter", description="Runs it.", parameters={"type": "object", "properties": {"code": {}}})
    text = tool_formats.resolve(name)().system_text([tool])
    assert "code_interpreter" in text
    assert "Runs it." in text
    assert '"code"' in text
