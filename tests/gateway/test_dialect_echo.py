"""What a client sends back of an answer reads as that answer: the policy's turn is found again whatever client carried it."""

import json

import pytest
from dialect_kit import ASKED, anthropic_client, assistant, make_turn, openai_client, served
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psrl.gateway.dialects import DIALECTS, AnthropicMessages, OpenAIChat, OpenAIResponses
from psrl.gateway.dialects.base import ChatRequest
from psrl.types import ToolCall

TEXT = st.text(max_size=30) | st.sampled_from(["\u2028", "\x85", "data: x\n\ndata: y", "</think>", "  ", '"\\', "😀", "\r\n", "\x00"])
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(TEXT, VALUE, max_size=3)
CALLS = st.lists(st.tuples(TEXT.filter(bool), ARGUMENTS), max_size=3).map(
    lambda calls: tuple(ToolCall(id=f"call-0-{index}", name=name, arguments=arguments) for index, (name, arguments) in enumerate(calls))
)
ANSWERS = st.builds(assistant, TEXT, reasoning=st.none() | TEXT, calls=CALLS)
USER = {"role": "user", "content": ASKED.content}
MANY = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


LOSES_REASONING = ("without reasoning", "by hand")


def assert_same(read, answer, dump):
    """Equal, but for the reasoning where the client drops it; numbers and booleans are told apart."""
    expected = assistant(answer.content, calls=answer.tool_calls) if dump in LOSES_REASONING else answer
    assert read == expected
    assert repr([call.arguments for call in read.tool_calls]) == repr([call.arguments for call in answer.tool_calls])


def parts(message, kind):
    """The same message with its content as a list of parts."""
    content = message["content"]
    return message | {"content": content if content is None else [{"type": kind, "text": content}]}


CHAT_DUMPS = {
    "with nulls": lambda m: m.model_dump(),
    "without nulls": lambda m: m.model_dump(exclude_none=True),
    "as it came": lambda m: m.model_dump(exclude_unset=True),
    "without reasoning": lambda m: m.model_dump(exclude={"reasoning_content"}),
    "as parts": lambda m: parts(m.model_dump(), "text"),
    "reasoning by its other name": lambda m: (
        m.model_dump(exclude={"reasoning_content"}) | {"reasoning": m.reasoning_content}
        if hasattr(m, "reasoning_content")
        else m.model_dump()
    ),
    "by hand": lambda m: {
        "role": "assistant",
        "content": m.content or "",
        "tool_calls": [
            {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": c.function.arguments}}
            for c in m.tool_calls or ()
        ],
    },
}


@pytest.fixture(scope="module", params=["whole", "streamed"])
def chat(request):
    with served(OpenAIChat()) as server, openai_client(server) as client:

        def ask(messages):
            if request.param == "whole":
                return client.chat.completions.create(model="policy", messages=messages).choices[0].message
            with client.chat.completions.stream(model="policy", messages=messages) as stream:
                return stream.get_final_completion().choices[0].message

        yield server, ask


@pytest.mark.parametrize("dump", CHAT_DUMPS)
@MANY
@given(answer=ANSWERS)
def test_a_chat_message_sent_back_is_the_answer(chat, dump, answer):
    server, ask = chat
    server.turn = make_turn(answer)
    ask([USER, CHAT_DUMPS[dump](ask([USER])), USER])
    assert len(server.requests[-1].messages) == 3
    assert_same(server.requests[-1].messages[1], answer, dump)


ANTHROPIC_DUMPS = {
    "blocks": lambda m: {"role": "assistant", "content": m.content},
    "to_param": lambda m: m.to_param(),
    "with nulls": lambda m: {"role": m.role, "content": [block.model_dump() for block in m.content]},
    "without nulls": lambda m: {"role": m.role, "content": [block.model_dump(exclude_none=True) for block in m.content]},
    "without reasoning": lambda m: {"role": m.role, "content": [block for block in m.content if block.type != "thinking"]},
}


@pytest.fixture(scope="module", params=["whole", "streamed"])
def messages_api(request):
    with served(AnthropicMessages()) as server, anthropic_client(server) as client:

        def ask(messages):
            if request.param == "whole":
                return client.messages.create(model="policy", max_tokens=9, messages=messages)
            with client.messages.stream(model="policy", max_tokens=9, messages=messages) as stream:
                return stream.get_final_message()

        yield server, ask


@pytest.mark.parametrize("dump", ANTHROPIC_DUMPS)
@MANY
@given(answer=ANSWERS)
def test_an_anthropic_message_sent_back_is_the_answer(messages_api, dump, answer):
    server, ask = messages_api
    server.turn = make_turn(answer)
    ask([USER, ANTHROPIC_DUMPS[dump](ask([USER])), USER])
    assert len(server.requests[-1].messages) == 3
    assert_same(server.requests[-1].messages[1], answer, dump)


def easy_items(response):
    """Items that agents write themselves: the text as an easy message, calls without ids of their own."""
    said = [{"role": "assistant", "content": response.output_text}] if response.output_text or response.output[-1].type == "message" else []
    calls = [
        {"type": "function_call", "call_id": c.call_id, "name": c.name, "arguments": c.arguments}
        for c in response.output
        if c.type == "function_call"
    ]
    return said + calls


RESPONSES_DUMPS = {
    "items": lambda r: list(r.output),
    "with nulls": lambda r: [item.model_dump() for item in r.output],
    "without nulls": lambda r: [item.model_dump(exclude_none=True) for item in r.output],
    "without reasoning": lambda r: [item for item in r.output if item.type != "reasoning"],
    "by hand": easy_items,
}


@pytest.fixture(scope="module", params=["whole", "streamed"])
def responses_api(request):
    with served(OpenAIResponses()) as server, openai_client(server) as client:

        def ask(**asked):
            if request.param == "whole":
                return client.responses.create(model="policy", **asked)
            with client.responses.stream(model="policy", **asked) as stream:
                return stream.get_final_response()

        yield server, ask


@pytest.mark.parametrize("dump", RESPONSES_DUMPS)
@MANY
@given(answer=ANSWERS)
def test_the_items_of_a_response_sent_back_are_the_answer(responses_api, dump, answer):
    server, ask = responses_api
    server.turn = make_turn(answer)
    ask(input=[USER, *RESPONSES_DUMPS[dump](ask(input=[USER])), USER])
    assert len(server.requests[-1].messages) == 3
    assert_same(server.requests[-1].messages[1], answer, dump)


@MANY
@given(answer=ANSWERS)
def test_a_response_that_is_followed_by_its_id_is_the_answer(responses_api, answer):
    server, ask = responses_api
    server.turn = make_turn(answer)
    ask(input="and?", previous_response_id=ask(input=[USER]).id)
    assert server.requests[-1].messages[1] == answer


@given(answer=ANSWERS)
@settings(deadline=None)
def test_every_event_of_every_dialect_is_one_line_of_ascii_json(answer):
    for dialect in DIALECTS:
        for event in dialect.write_stream(make_turn(answer), ChatRequest(messages=(ASKED,), wants_usage=True)):
            text = event.decode("ascii")
            assert text.endswith("\n\n")
            *_, data = text.strip("\n").splitlines()
            assert data == "data: [DONE]" or json.loads(data.removeprefix("data: "))
