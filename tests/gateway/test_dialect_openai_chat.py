"""Chat completions through OpenAI's own client, and every request that is refused."""

import json

import openai
import pytest
from dialect_kit import ASKED, CALL, assistant, make_turn, openai_client, outcome_of, served

from psrl.errors import SessionRequestError
from psrl.gateway.dialects import OpenAIChat
from psrl.gateway.dialects.base import TurnEnd
from psrl.gateway.dialects.fields import ReadBefore
from psrl.types import Message, Role, ToolCall, ToolSchema

USER = {"role": "user", "content": "What is 2+3?"}
RUN = {"type": "function", "function": {"name": "run", "description": "Runs it.", "parameters": {"type": "object"}, "strict": True}}
THOUGHTFUL = assistant("It is five.", reasoning="2+3", calls=[CALL, ToolCall(id="call-0-1", name="stop", arguments={})])


@pytest.fixture
def server():
    with served(OpenAIChat()) as server:
        yield server


@pytest.fixture
def client(server):
    with openai_client(server) as client:
        yield client


def read(**body):
    return OpenAIChat().read_request({"model": "policy", "messages": [USER], **body}, history=lambda id: [], read_before=ReadBefore())


def call(arguments, **fields):
    return {"id": "c", "type": "function", "function": {"name": "run", "arguments": arguments, **fields}}


def answered(**fields):
    return [{"role": "assistant", **fields}, USER]


def test_the_official_client_reads_an_answer(server, client):
    server.turn = make_turn(THOUGHTFUL)
    completion = client.chat.completions.create(model="policy", messages=[USER], tools=[RUN])
    (choice,) = completion.choices
    assert completion.object == "chat.completion" and completion.id == "chatcmpl-t0" and completion.model == "policy"
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "It is five." and choice.message.reasoning_content == "2+3"
    assert [(c.id, c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls] == [
        ("call-0-0", "run", CALL.arguments),
        ("call-0-1", "stop", {}),
    ]
    usage = completion.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (10, 3, 13)
    assert usage.prompt_tokens_details.cached_tokens == 4
    assert server.requests[0].messages == (ASKED,)
    assert server.requests[0].tools == (ToolSchema(name="run", description="Runs it.", parameters={"type": "object"}),)


def test_the_official_client_puts_a_stream_together_to_the_same_answer(server, client):
    server.turn = make_turn(THOUGHTFUL)
    asked = {"model": "policy", "messages": [USER], "tools": [RUN | {"function": RUN["function"] | {"strict": False}}]}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        streamed = stream.get_final_completion()
    assert streamed.choices[0].finish_reason == "tool_calls"
    assert streamed.usage == whole.usage and streamed.id == whole.id
    streamed_message, whole_message = streamed.choices[0].message, whole.choices[0].message
    assert streamed_message.content == whole_message.content
    assert streamed_message.reasoning_content == whole_message.reasoning_content
    assert [c.function.name for c in streamed_message.tool_calls] == ["run", "stop"]
    assert [c.function.arguments for c in streamed_message.tool_calls] == [c.function.arguments for c in whole_message.tool_calls]


def test_a_stream_says_role_reasoning_content_calls_end_in_this_order(server, client):
    server.turn = make_turn(THOUGHTFUL)
    chunks = list(client.chat.completions.create(model="policy", messages=[USER], stream=True, stream_options={"include_usage": True}))
    said = [[name for name, value in chunk.choices[0].delta.model_dump().items() if value] for chunk in chunks if chunk.choices]
    assert said == [["role"], ["reasoning_content"], ["content"], ["tool_calls"], ["tool_calls"], []]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 5 + ["tool_calls"]
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 13
    assert {chunk.usage for chunk in chunks[:-1]} == {None}


def test_a_stream_without_include_usage_has_no_chunk_of_usage(server, client):
    chunks = list(client.chat.completions.create(model="policy", messages=[USER], stream=True))
    assert all(len(chunk.choices) == 1 and chunk.usage is None for chunk in chunks)


def test_a_stream_ends_with_done():
    request = read(stream=True)
    assert list(OpenAIChat().write_stream(make_turn(assistant("five")), request))[-1] == b"data: [DONE]\n\n"


def test_a_cut_turn_ends_with_length(server, client):
    server.turn = make_turn(assistant("It is"), end=TurnEnd.LENGTH)
    assert client.chat.completions.create(model="policy", messages=[USER]).choices[0].finish_reason == "length"


def test_an_answer_of_calls_alone_has_null_content_and_an_empty_answer_has_empty_content(server, client):
    server.turn = make_turn(assistant(calls=[CALL]))
    assert client.chat.completions.create(model="policy", messages=[USER]).choices[0].message.content is None
    server.turn = make_turn(assistant())
    assert client.chat.completions.create(model="policy", messages=[USER]).choices[0].message.content == ""


@pytest.mark.parametrize("reasoning", ["", None])
def test_reasoning_without_a_word_is_told_from_no_reasoning(server, client, reasoning):
    server.turn = make_turn(assistant("five", reasoning=reasoning))
    whole = client.chat.completions.create(model="policy", messages=[USER]).choices[0].message
    chunks = list(client.chat.completions.create(model="policy", messages=[USER], stream=True))
    expected = {} if reasoning is None else {"reasoning_content": ""}
    assert whole.model_extra == expected
    assert {name: text for chunk in chunks for name, text in chunk.choices[0].delta.model_extra.items()} == expected


def test_logprobs_are_those_of_every_sampled_token(server, client):
    server.turn = make_turn(assistant("five"), token_texts=("fi", "vé", "<end>"))
    entries = client.chat.completions.create(model="policy", messages=[USER], logprobs=True).choices[0].logprobs.content
    assert [(e.token, e.logprob, e.bytes) for e in entries] == [
        ("fi", -0.5, [102, 105]),
        ("vé", -0.25, [118, 195, 169]),
        ("<end>", -0.125, [60, 101, 110, 100, 62]),
    ]
    chunks = list(client.chat.completions.create(model="policy", messages=[USER], logprobs=True, stream=True))
    assert [e for chunk in chunks if chunk.choices[0].logprobs for e in chunk.choices[0].logprobs.content] == entries


@pytest.mark.parametrize("stream", [False, True])
def test_return_token_ids_gives_ids_logprobs_and_versions(server, client, stream):
    asked = client.chat.completions.create(model="policy", messages=[USER], stream=stream, extra_body={"return_token_ids": True})
    choice = list(asked)[-1].choices[0] if stream else asked.choices[0]
    assert (choice.token_ids, choice.token_logprobs, choice.policy_versions) == ([7, 8, 2], [-0.5, -0.25, -0.125], [3, 3, 4])


def test_an_error_reaches_the_official_client_with_its_code_and_parameter(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="policy", messages=[USER], n=2)
    assert (caught.value.status_code, caught.value.code, caught.value.param) == (400, "unsupported_parameter", "n")
    assert caught.value.type == "invalid_request_error" and "only 1 is" in caught.value.message


@pytest.mark.parametrize(
    ("status", "kind", "type"),
    [
        (404, openai.NotFoundError, "invalid_request_error"),
        (429, openai.RateLimitError, "rate_limit_error"),
        (503, openai.InternalServerError, "server_error"),
    ],
)
def test_an_error_of_the_session_reaches_the_official_client(server, client, status, kind, type):
    server.error = SessionRequestError(status=status, code="why", message="because")
    with pytest.raises(kind) as caught:
        client.chat.completions.create(model="policy", messages=[USER])
    assert (caught.value.code, caught.value.type) == ("why", type)


def test_an_error_inside_a_stream_is_raised_by_the_official_client(server, client):
    server.stream_error = SessionRequestError(status=503, code="engine_lost", message="the engine is gone")
    with pytest.raises(openai.APIError, match="the engine is gone") as caught:
        list(client.chat.completions.create(model="policy", messages=[USER], stream=True))
    assert caught.value.code == "engine_lost"


def test_every_kind_of_message_is_read():
    request = read(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "name": "ann", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+3?"}]},
            {
                "role": "assistant",
                "content": None,
                "reasoning": "2+3",
                "tool_calls": [call('{"code": "2+3"}')],
                "refusal": None,
                "extra": 1,
            },
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "5"}]},
        ]
    )
    assert request.messages == (
        Message(role=Role.SYSTEM, content="Be brief."),
        ASKED,
        assistant(reasoning="2+3", calls=[ToolCall(id="c", name="run", arguments={"code": "2+3"})]),
        Message(role=Role.TOOL, content="5", tool_call_id="c", name="run"),
    )


def test_tool_choice_none_takes_the_tools_away_and_empty_arguments_are_none():
    assert read(tools=[RUN], tool_choice="none").tools == ()
    assert read(tools=[RUN], tool_choice="auto").tools == read(tools=[RUN]).tools != ()
    assert read(messages=answered(tool_calls=[call("")])).messages[0].tool_calls[0].arguments == {}
    bare = {"type": "function", "function": {"name": "run"}}
    assert read(tools=[bare]).tools == (ToolSchema(name="run", description="", parameters={"type": "object", "properties": {}}),)


def test_the_smaller_of_both_token_limits_and_every_stop_text_are_asked():
    assert read(max_tokens=5, max_completion_tokens=3).sampling.max_tokens == 3
    assert read(max_completion_tokens=7).sampling.max_tokens == 7
    assert read().sampling.max_tokens is None
    assert read(stop="END").sampling.stop == ("END",)
    assert read(stop=["a", "b", "c", "d"]).sampling.stop == ("a", "b", "c", "d")
    assert read(stop=None).sampling.stop == ()


@pytest.mark.parametrize(
    ("sent", "asked"),
    [
        ({"temperature": 0.2}, {"temperature": 0.2}),
        ({"temperature": 0}, {"temperature": 0}),
        ({"temperature": 1, "top_p": 1.0, "top_k": -1, "presence_penalty": 0.0, "logit_bias": {}, "parallel_tool_calls": True}, {}),
        (
            {"parallel_tool_calls": False, "seed": 3, "logit_bias": {"5": 1}},
            {"parallel_tool_calls": False, "seed": 3, "logit_bias": {"5": 1}},
        ),
        ({"reasoning_effort": "high", "verbosity": "medium"}, {"reasoning_effort": "high"}),
        ({"temperature": None, "seed": None, "n": None, "functions": None, "tools": None, "tool_choice": None}, {}),
        ({"n": 1, "response_format": {"type": "text"}, "top_logprobs": 0, "modalities": ["text"]}, {}),
        ({"metadata": {"a": "b"}, "user": "u", "store": True, "service_tier": "auto", "prompt_cache_key": "k"}, {}),
    ],
)
def test_what_is_asked_of_sampling_is_handed_on_unless_it_is_neutral(sent, asked):
    assert read(**sent).sampling.others == asked


IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"messages": None}, "missing_required_parameter", "messages"),
        ({"messages": "hi"}, "invalid_value", "messages"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": ["hi"]}, "invalid_value", "messages[0]"),
        ({"messages": [{"content": "hi"}]}, "missing_required_parameter", "messages[0].role"),
        ({"messages": [{"role": "function", "content": "hi"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_value", "messages[0].content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "invalid_value", "messages[0].content"),
        ({"messages": [{"role": "user", "content": [USER]}]}, "missing_required_parameter", "messages[0].content[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, IMAGE]}]},
            "unsupported_value",
            "messages[0].content[1]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "unsupported_value", "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, "unsupported_value", "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "missing_required_parameter", "messages[0].content[0].text"),
        ({"messages": [USER, {"role": "assistant", "content": "It"}]}, "unsupported_value", "messages"),
        ({"messages": [{"role": "tool", "content": "5"}]}, "missing_required_parameter", "messages[0].tool_call_id"),
        ({"messages": answered(function_call={"name": "run"})}, "unsupported_value", "messages[0].function_call"),
        ({"messages": answered(audio={"id": "a"})}, "unsupported_value", "messages[0].audio"),
        ({"messages": answered(refusal="no")}, "unsupported_value", "messages[0].refusal"),
        ({"messages": answered(reasoning_content=[1])}, "invalid_value", "messages[0].reasoning_content"),
        ({"messages": answered(tool_calls={})}, "invalid_value", "messages[0].tool_calls"),
        ({"messages": answered(tool_calls=[{"type": "custom"}])}, "unsupported_value", "messages[0].tool_calls[0].type"),
        ({"messages": answered(tool_calls=[{}])}, "missing_required_parameter", "messages[0].tool_calls[0].function"),
        ({"messages": answered(tool_calls=[call("{")])}, "invalid_value", "messages[0].tool_calls[0].function.arguments"),
        ({"messages": answered(tool_calls=[call("[1]")])}, "invalid_value", "messages[0].tool_calls[0].function.arguments"),
        ({"messages": answered(tool_calls=[call('{"a": NaN}')])}, "invalid_value", "messages[0].tool_calls[0].function.arguments"),
        ({"messages": answered(tool_calls=[call('{"a": "\\ud800"}')])}, "invalid_value", "messages[0].tool_calls[0].function.arguments"),
        ({"messages": answered(tool_calls=[call('{"a":' * 5000)])}, "invalid_value", "messages[0].tool_calls[0].function.arguments"),
        (
            {"messages": answered(tool_calls=[call('{"a":' * 200 + "1" + "}" * 200)])},
            "invalid_value",
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": answered(tool_calls=[call({"a": 1})])}, "invalid_value", "messages[0].tool_calls[0].function.arguments"),
        ({"messages": answered(tool_calls=[call("{}", name="")])}, "invalid_value", "messages[0].tool_calls[0].function.name"),
        ({"messages": answered(tool_calls=[call("{}") | {"id": None}])}, "invalid_value", "messages[0].tool_calls[0].id"),
        ({"model": 5}, "invalid_value", "model"),
        ({"tools": {}}, "invalid_value", "tools"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "unsupported_value", "tools[0].type"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_value", "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "missing_required_parameter", "tools[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "missing_required_parameter", "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "invalid_value", "tools[0].function.parameters"),
        ({"tools": [RUN, RUN]}, "invalid_value", "tools"),
        ({"tool_choice": "required"}, "unsupported_value", "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "run"}}}, "unsupported_value", "tool_choice"),
        ({"tool_choice": "any"}, "invalid_value", "tool_choice"),
        ({"n": 2}, "unsupported_parameter", "n"),
        ({"n": True}, "unsupported_parameter", "n"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "invalid_value", "stop"),
        ({"stop": ""}, "invalid_value", "stop"),
        ({"stop": [5]}, "invalid_value", "stop"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": 1.5}, "invalid_value", "max_tokens"),
        ({"max_completion_tokens": True}, "invalid_value", "max_completion_tokens"),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "unsupported_parameter", "response_format"),
        ({"stream": "yes"}, "invalid_value", "stream"),
        ({"stream_options": {"include_usage": 1}}, "invalid_value", "stream_options.include_usage"),
        ({"stream_options": []}, "invalid_value", "stream_options"),
        ({"logprobs": 5}, "invalid_value", "logprobs"),
        ({"top_logprobs": 5}, "unsupported_parameter", "top_logprobs"),
        ({"return_token_ids": "yes"}, "invalid_value", "return_token_ids"),
        ({"functions": []}, "unsupported_parameter", "functions"),
        ({"function_call": "auto"}, "unsupported_parameter", "function_call"),
        ({"modalities": ["text", "audio"]}, "unsupported_parameter", "modalities"),
        ({"web_search_options": {}}, "unsupported_parameter", "web_search_options"),
        ({"temperature": "hot"}, "invalid_value", "temperature"),
        ({"temperature": True}, "invalid_value", "temperature"),
        ({"seed": 1.5}, "invalid_value", "seed"),
        ({"parallel_tool_calls": "no"}, "invalid_value", "parallel_tool_calls"),
        ({"guided_json": {}}, "unknown_parameter", "guided_json"),
    ],
)
def test_a_bad_request_is_refused_with_its_code_and_parameter(change, code, param):
    assert outcome_of(OpenAIChat(), {"model": "policy", "messages": [USER], **change}) == (400, code, param)


def test_a_body_that_is_no_object_is_refused():
    assert outcome_of(OpenAIChat(), [1]) == (400, "invalid_value", "body")
