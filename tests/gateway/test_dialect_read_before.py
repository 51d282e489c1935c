"""What a session's request shares with the one before is not read again, and nobody can tell from the messages."""

import pytest
from dialect_kit import outcome_of
from hypothesis import given
from hypothesis import strategies as st

from psrl.gateway.dialects import AnthropicMessages, OpenAIChat, OpenAIResponses
from psrl.gateway.dialects.fields import ReadBefore

USER = {"role": "user", "content": "go"}


def chat_call(name):
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": name, "arguments": "{}"}}],
    }


def anthropic_call(name):
    return {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": name, "input": {}}]}


def responses_call(name):
    return {"type": "function_call", "call_id": "c", "name": name, "arguments": "{}"}


# Few messages, so that requests share beginnings; both calls have one id, so a tool's name depends on what came before.
CHAT = [USER, chat_call("run"), chat_call("stop"), {"role": "tool", "tool_call_id": "c", "content": "5"}]
ANTHROPIC_RESULT = {
    "role": "user",
    "content": [{"type": "tool_result", "tool_use_id": "c", "content": "5"}, {"type": "text", "text": "on"}],
}
ANTHROPIC = [USER, anthropic_call("run"), anthropic_call("stop"), ANTHROPIC_RESULT]
RESPONSES = [USER, responses_call("run"), responses_call("stop"), {"type": "function_call_output", "call_id": "c", "output": "5"}]


@pytest.mark.parametrize(
    ("dialect", "field", "pool", "rest"),
    [
        (OpenAIChat(), "messages", CHAT, {}),
        (AnthropicMessages(), "messages", ANTHROPIC, {"max_tokens": 9}),
        (OpenAIResponses(), "input", RESPONSES, {}),
    ],
    ids=["chat", "anthropic", "responses"],
)
@given(data=st.data())
def test_requests_of_a_session_read_as_if_each_were_the_first(dialect, field, pool, rest, data):
    conversations = data.draw(st.lists(st.lists(st.sampled_from([*pool, "bad"]), max_size=6), max_size=6))
    read_before = ReadBefore()
    for conversation in conversations:
        body = {field: [*conversation, USER], **rest}
        assert outcome_of(dialect, body, read_before=read_before) == outcome_of(dialect, body)
