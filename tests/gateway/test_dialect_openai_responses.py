"""OpenAI's responses through its own client, and every request that is refused."""

import json

import openai
import pytest
from dialect_kit import ASKED, CALL, assistant, make_turn, openai_client, outcome_of, served

from psrl.errors import SessionRequestError
from psrl.gateway.dialects import OpenAIResponses
from psrl.gateway.dialects.base import TurnEnd
from psrl.gateway.dialects.fields import ReadBefore
from psrl.types import Message, Role, ToolCall, ToolSchema

RUN = {"type": "function", "name": "run", "description": "Runs it.", "parameters": {"type": "object"}, "strict": True}
ASK = {"model": "policy", "input": "What is 2+3?"}
THOUGHTFUL = assistant("It is five.", reasoning="2+3", calls=[CALL, ToolCall(id="call-0-1", name="stop", arguments={})])
BRIEF = Message(role=Role.SYSTEM, content="Be brief.")


@pytest.fixture
def server():
    with served(OpenAIResponses()) as server:
        yield server


@pytest.fixture
def client(server):
    with openai_client(server) as client:
        yield client


def read(*, history=(), **body):
    return OpenAIResponses().read_request({**ASK, **body}, history=lambda id: list(history), read_before=ReadBefore())


def call(arguments="{}", **fields):
    return {"type": "function_call", "call_id": "c", "name": "run", "arguments": arguments, **fields}


def items(*entries):
    return {"input": list(entries)}


def test_the_official_client_reads_an_answer(server, client):
    server.turn = make_turn(THOUGHTFUL)
    response = client.responses.create(**ASK, tools=[RUN], instructions="Be brief.", max_output_tokens=9, store=False)
    assert response.id == "resp_t0" and response.status == "completed" and response.model == "policy"
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, _, *calls = response.output
    assert reasoning.content[0].text == "2+3" and response.output_text == "It is five."
    assert [(c.call_id, c.name, json.loads(c.arguments)) for c in calls] == [("call-0-0", "run", CALL.arguments), ("call-0-1", "stop", {})]
    assert len({item.id for item in response.output}) == 4
    usage = response.usage
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens, usage.output_tokens, usage.total_tokens) == (10, 4, 3, 13)
    assert server.requests[0].messages == (BRIEF, ASKED)
    assert server.requests[0].tools == (ToolSchema(name="run", description="Runs it.", parameters={"type": "object"}),)
    assert server.requests[0].sampling.max_tokens == 9


def test_the_official_client_puts_a_stream_together_to_the_same_answer(server, client):
    server.turn = make_turn(THOUGHTFUL)
    whole = client.responses.create(**ASK)
    with client.responses.stream(**ASK) as stream:
        streamed = stream.get_final_response()
    assert streamed.to_dict() | {"output": None} == whole.to_dict() | {"output": None}
    assert [item.type for item in streamed.output] == [item.type for item in whole.output]
    assert streamed.output_text == whole.output_text


def test_what_the_events_of_a_stream_add_up_to_is_the_final_response(server, client):
    server.turn = make_turn(THOUGHTFUL)
    events = list(client.responses.create(**ASK, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text_events = ["content_part.added", "{}.delta", "{}.done", "content_part.done"]
    call_events = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert [event.type.removeprefix("response.") for event in events] == [
        "created",
        "in_progress",
        "output_item.added",
        *[name.format("reasoning_text") for name in text_events],
        "output_item.done",
        "output_item.added",
        *[name.format("output_text") for name in text_events],
        "output_item.done",
        *call_events * 2,
        "completed",
    ]
    final = events[-1].response
    assert [event.item for event in events if event.type == "response.output_item.done"] == final.output
    assert [event.item.id for event in events if event.type == "response.output_item.added"] == [item.id for item in final.output]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == final.output_text
    by_item = {event.item_id: event.delta for event in events if event.type == "response.function_call_arguments.delta"}
    assert by_item == {item.id: item.arguments for item in final.output if item.type == "function_call"}
    assert events[0].response.status == "in_progress" and events[0].response.output == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_turn_is_incomplete(server, client, stream):
    server.turn = make_turn(assistant("It is"), end=TurnEnd.LENGTH)
    answer = client.responses.create(**ASK, stream=stream)
    response = answer
    if stream:
        last = list(answer)[-1]
        assert last.type == "response.incomplete"
        response = last.response
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"


def test_logprobs_are_given_where_they_are_included(server, client):
    include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    response = client.responses.create(**ASK, include=include)
    assert [(e.token, e.logprob) for e in response.output[0].content[0].logprobs] == [("fi", -0.5), ("ve", -0.25), ("<end>", -0.125)]
    assert client.responses.create(**ASK).output[0].content[0].logprobs == []


def test_a_response_is_followed_by_its_id(server, client):
    server.turn = make_turn(assistant(calls=[CALL]), id="t1")
    first = client.responses.create(**ASK, instructions="Be brief.", tools=[RUN])
    output = {"type": "function_call_output", "call_id": CALL.id, "output": "5"}
    client.responses.create(model="policy", input=[output], previous_response_id=first.id, instructions="Be brief.", tools=[RUN])
    answer = Message(role=Role.TOOL, content="5", tool_call_id=CALL.id, name="run")
    assert server.requests[1].messages == (BRIEF, ASKED, server.turn.answer, answer)


def test_instructions_replace_those_of_the_response_that_is_followed():
    new = Message(role=Role.SYSTEM, content="Be long.")
    follow = {"previous_response_id": "resp_t1", "input": "What is 2+3?"}
    assert read(history=[BRIEF, ASKED, assistant("5")], instructions="Be long.", **follow).messages == (new, ASKED, assistant("5"), ASKED)
    assert read(history=[ASKED, assistant("5")], instructions="Be long.", **follow).messages == (new, ASKED, assistant("5"), ASKED)
    assert read(history=[BRIEF, ASKED, assistant("5")], **follow).messages == (BRIEF, ASKED, assistant("5"), ASKED)


def test_an_unknown_response_is_not_found(client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(**ASK, previous_response_id="resp_never")
    assert caught.value.param == "previous_response_id"


def test_every_kind_of_item_is_read_and_the_items_of_an_answer_are_one_message():
    user = {"role": "user", "content": [{"type": "input_text", "text": "What is "}, {"type": "input_text", "text": "2+3?"}]}
    request = read(
        input=[
            {"type": "message", "role": "developer", "content": "Be brief."},
            user,
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "2+3"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see.", "annotations": []}]},
            call('{"code": "2+3"}'),
            call("", call_id="d"),
            {"type": "function_call_output", "call_id": "c", "output": "5"},
            {"type": "function_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "no"}]},
            {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "secret"},
            {"role": "assistant", "content": "It is five."},
            {"role": "assistant", "content": "Really."},
            user,
        ]
    )
    calls = [ToolCall(id="c", name="run", arguments={"code": "2+3"}), ToolCall(id="d", name="run", arguments={})]
    assert request.messages == (
        BRIEF,
        ASKED,
        assistant("Let me see.", reasoning="2+3", calls=calls),
        Message(role=Role.TOOL, content="5", tool_call_id="c", name="run"),
        Message(role=Role.TOOL, content="no", tool_call_id="d", name="run"),
        assistant("It is five."),
        assistant("Really."),
        ASKED,
    )


@pytest.mark.parametrize(
    ("sent", "asked"),
    [
        ({"temperature": 0.2, "parallel_tool_calls": False}, {"temperature": 0.2, "parallel_tool_calls": False}),
        ({"temperature": 1, "top_p": 1, "parallel_tool_calls": True, "background": False, "top_logprobs": 0}, {}),
        ({"reasoning": {"effort": "low", "summary": "auto"}}, {"reasoning_effort": "low"}),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {"verbosity": "low"}),
        ({"text": {"verbosity": "medium"}, "reasoning": {}}, {}),
        ({"store": False, "truncation": "auto", "metadata": {}, "client_metadata": {}, "include": ["reasoning.encrypted_content"]}, {}),
    ],
)
def test_what_is_asked_of_sampling_is_handed_on_unless_it_is_neutral(sent, asked):
    assert read(**sent).sampling.others == asked


def test_an_error_reaches_the_official_client_with_its_code_and_parameter(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**ASK, background=True)
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (400, "unsupported_parameter", "background")


def test_an_error_inside_a_stream_is_raised_by_the_official_client(server, client):
    server.stream_error = SessionRequestError(status=503, code="engine_lost", message="the engine is gone")
    with pytest.raises(openai.APIError, match="the engine is gone"):
        list(client.responses.create(**ASK, stream=True))


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"input": None}, "missing_required_parameter", "input"),
        ({"input": 5}, "invalid_value", "input"),
        ({"input": []}, "invalid_value", "input"),
        (items("hi"), "invalid_value", "input[0]"),
        (items({"type": "item_reference", "id": "i"}), "unsupported_value", "input[0].type"),
        (items({"type": "web_search_call"}), "unsupported_value", "input[0].type"),
        (items({"type": ["message"]}), "unsupported_value", "input[0].type"),
        (items({"content": "hi"}), "missing_required_parameter", "input[0].role"),
        (items({"role": "tool", "content": "hi"}), "invalid_value", "input[0].role"),
        (items({"role": "user"}), "missing_required_parameter", "input[0].content"),
        (items({"role": "user", "content": [{"type": "input_image"}]}), "unsupported_value", "input[0].content[0]"),
        (items({"role": "user", "content": [{"type": "input_file"}]}), "unsupported_value", "input[0].content[0]"),
        (items({"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}), "unsupported_value", "input[0].content[0]"),
        (items({"role": "assistant", "content": "It is"}), "unsupported_value", "input"),
        (items(call()), "unsupported_value", "input"),
        (items(call("{")), "invalid_value", "input[0].arguments"),
        (items(call("[]")), "invalid_value", "input[0].arguments"),
        (items(call(None)), "missing_required_parameter", "input[0].arguments"),
        (items(call(call_id=None)), "invalid_value", "input[0].call_id"),
        (items(call(name="")), "invalid_value", "input[0].name"),
        (items({"type": "function_call_output", "output": "5"}), "missing_required_parameter", "input[0].call_id"),
        (items({"type": "function_call_output", "call_id": "c"}), "missing_required_parameter", "input[0].output"),
        (
            items({"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}),
            "unsupported_value",
            "input[0].output[0]",
        ),
        (items({"type": "reasoning", "content": [{"type": "text", "text": "a"}]}), "unsupported_value", "input[0].content[0]"),
        ({"instructions": 5}, "invalid_value", "instructions"),
        ({"previous_response_id": 5}, "invalid_value", "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_value", "tools[0].type"),
        ({"tools": [{"type": "custom", "name": "patch"}]}, "unsupported_value", "tools[0].type"),
        ({"tools": [{"name": "run"}]}, "missing_required_parameter", "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "run"}}]}, "missing_required_parameter", "tools[0].name"),
        ({"tools": [RUN, RUN]}, "invalid_value", "tools"),
        ({"tool_choice": "required"}, "unsupported_value", "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "run"}}, "unsupported_value", "tool_choice"),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema"}}}, "unsupported_value", "text.format"),
        ({"text": "text"}, "invalid_value", "text"),
        ({"reasoning": "low"}, "invalid_value", "reasoning"),
        ({"include": "all"}, "invalid_value", "include"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"conversation": "c"}, "unsupported_parameter", "conversation"),
        ({"prompt": {"id": "p"}}, "unsupported_parameter", "prompt"),
        ({"top_logprobs": 3}, "unsupported_parameter", "top_logprobs"),
        ({"stream": "yes"}, "invalid_value", "stream"),
        ({"messages": []}, "unknown_parameter", "messages"),
    ],
)
def test_a_bad_request_is_refused_with_its_code_and_parameter(change, code, param):
    assert outcome_of(OpenAIResponses(), ASK | change) == (400, code, param)
