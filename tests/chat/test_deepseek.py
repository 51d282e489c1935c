"""DeepSeek's two formats."""

import pytest

from psrl.chat.parsers import DeepSeekFormat
from psrl.types import ToolCall, ToolCallError

DEEPSEEK = DeepSeekFormat()
BEGIN, OPEN, SEP, CLOSE, END = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
V3 = f'{OPEN}function{SEP}f\n```json\n{{"code": "```\\n{CLOSE}"}}\n```{CLOSE}'
V31 = f'{OPEN}f{SEP}{{"code": "```\\n{CLOSE}"}}{CLOSE}'


@pytest.mark.parametrize("calls", [f"{V3}\n{V3}", f"{V31}{V31}", f"{V3}{V31}"])
@pytest.mark.parametrize(("before", "after"), [(BEGIN, END), ("", ""), (BEGIN, ""), (BEGIN + "\n", "\n" + END)])
def test_both_formats_are_read(calls, before, after):
    parsed = DEEPSEEK.parse(f"First.{before}{calls}{after}", turn=0)
    assert parsed.calls == tuple(ToolCall(id=f"call-0-{i}", name="f", arguments={"code": f"```\n{CLOSE}"}) for i in range(2))
    assert parsed.content == "First."


def test_a_tool_may_be_called_function():
    (call,) = DEEPSEEK.parse(f"{OPEN}function{SEP}{{}}{CLOSE}", turn=0).calls
    assert call == ToolCall(id="call-0-0", name="function", arguments={})


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (BEGIN, "unclosed"),
        (f"{BEGIN}{END}", "missing_name"),
        (OPEN, "unclosed"),
        (f"{OPEN} {SEP}{{}}{CLOSE}", "missing_name"),
        (f"{OPEN}f\ng{SEP}{{}}{CLOSE}", "missing_name"),
        (f"{OPEN}{CLOSE}", "missing_name"),
        (f"{OPEN}f{CLOSE}", "missing_name"),
        (f"{OPEN}f{SEP}{{}}", "unclosed"),
        (f'{OPEN}f{SEP}{{"a": }}{CLOSE}', "invalid_json"),
        (f"{OPEN}f{SEP}{{}} and{CLOSE}", "invalid_json"),
        (f"{OPEN}f{SEP}[1]{CLOSE}", "arguments_not_object"),
        (f"{OPEN}f{SEP}{CLOSE}", "invalid_json"),
        (f'{OPEN}f{SEP}{{"a": "\\ud800"}}{CLOSE}', "invalid_unicode"),
        (f"{OPEN}function{SEP}f\n```json\n{{}}{CLOSE}", "invalid_json"),
    ],
)
def test_each_way_to_break_a_call_has_its_cause(text, cause):
    parsed = DEEPSEEK.parse(text, turn=0)
    (error,) = parsed.calls
    assert isinstance(error, ToolCallError)
    assert (error.cause, error.written, parsed.content) == (cause, text, "")
