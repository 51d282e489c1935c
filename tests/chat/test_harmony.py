"""Harmony's messages: channels, recipients, and what ends each."""

import pytest

from psrl.chat.parsers import HarmonyFormat
from psrl.types import ToolCall, ToolCallError

HARMONY = HarmonyFormat()
CALL = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"


def read(text):
    reasoning, rest = HARMONY.split_reasoning(text, is_open=False)
    parsed = HARMONY.parse(rest, turn=0)
    return reasoning, parsed.content, parsed.calls


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel|>final<|message|>5", None, "5"),
        ("<|channel|>final<|message|> 5 \n", None, " 5 \n"),
        ("<|channel|>analysis<|message|>Add.<|end|><|start|>assistant<|channel|>final<|message|>5", "Add.", "5"),
        ("<|channel|>analysis<|message|>Add.<|start|>assistant<|channel|>final<|message|>5", "Add.", "5"),
        (
            "<|channel|>analysis<|message|>The token <|end|> ends it.<|end|><|start|>assistant<|channel|>final<|message|>5",
            "The token <|end|> ends it.",
            "5",
        ),
        ("<|channel|>analysis<|message|>Cut", "Cut", ""),
        ("<|channel|>analysis<|message|>", "", ""),
        ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final<|message|>5", None, "I look.\n5"),
        ("no channel at all", None, "no channel at all"),
        ("to=functions.f without a header", None, "to=functions.f without a header"),
        ("", None, ""),
    ],
)
def test_channels_say_what_is_reasoning_and_what_is_content(text, reasoning, content):
    assert read(text) == (reasoning, content, ())


@pytest.mark.parametrize(
    "header",
    [
        CALL,
        "<|channel|>commentary to=functions.f<|message|>",
        "<|channel|>commentary to=functions.f json<|message|>",
        " to=functions.f<|channel|>commentary json<|message|>",
        " to=functions.f<|channel|>analysis<|message|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.f<|channel|>commentary<|constrain|>json<|message|>",
    ],
)
@pytest.mark.parametrize("ending", ["", "<|call|>", "<|end|>", "\n<|call|>"])
def test_a_recipient_stands_in_the_role_or_after_the_channel(header, ending):
    _, content, calls = read(header + '{"code": "print(\'<|call|>\')"}' + ending)
    assert calls == (ToolCall(id="call-0-0", name="f", arguments={"code": "print('<|call|>')"}),)
    assert content == ""


def test_tools_that_are_no_functions_keep_their_whole_name():
    _, _, calls = read('<|channel|>analysis to=browser.search<|message|>{"query": "x"}')
    assert calls == (ToolCall(id="call-0-0", name="browser.search", arguments={"query": "x"}),)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (CALL + '{"a": }<|call|>', "invalid_json"),
        (CALL + '{"a": 1} or so<|call|>', "invalid_json"),
        (CALL + '{"a": "x', "invalid_json"),
        (CALL + "print(1)<|call|>", "invalid_json"),
        (CALL + "[1]<|call|>", "arguments_not_object"),
        (CALL + "<|call|>", "empty"),
        (CALL, "empty"),
        (CALL.removesuffix("<|message|>"), "unclosed"),
        ("<|channel|>commentary to=functions.<|message|>{}<|call|>", "missing_name"),
    ],
)
def test_each_way_to_break_a_call_has_its_cause(text, cause):
    _, content, (error,) = read(text)
    assert isinstance(error, ToolCallError)
    assert (error.cause, error.written, content) == (cause, text, "")


def test_a_call_that_is_only_thought_about_is_not_made():
    thought = f"I could write {CALL.removeprefix('<|channel|>')} here."
    text = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant<|channel|>final<|message|>5"
    reasoning, content, calls = read(text)
    assert (reasoning, content, calls) == (thought, "5", ())
