"""Anthropic's messages through its own client, and every request that is refused."""

import anthropic
import pytest
from dialect_kit import ASKED, CALL, anthropic_client, assistant, make_turn, outcome_of, served

from psrl.errors import SessionRequestError
from psrl.gateway.dialects import AnthropicMessages
from psrl.gateway.dialects.base import TurnEnd
from psrl.gateway.dialects.fields import ReadBefore
from psrl.types import Message, Role, ToolCall, ToolSchema

USER = {"role": "user", "content": "What is 2+3?"}
RUN = {"name": "run", "description": "Runs it.", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
ASK = {"model": "policy", "max_tokens": 64, "messages": [USER]}
THOUGHTFUL = assistant("It is five.", reasoning="2+3", calls=[CALL, ToolCall(id="call-0-1", name="stop", arguments={})])
TEXT = {"type": "text", "text": "and now?"}


@pytest.fixture
def server():
    with served(AnthropicMessages()) as server:
        yield server


@pytest.fixture
def client(server):
    with anthropic_client(server) as client:
        yield client


def read(**body):
    return AnthropicMessages().read_request({**ASK, **body}, history=lambda id: [], read_before=ReadBefore())


def said(*content, role="user"):
    return {"messages": [{"role": role, "content": list(content)}, USER]}


def result(**fields):
    return {"type": "tool_result", "tool_use_id": "c", **fields}


def test_the_official_client_reads_an_answer(server, client):
    server.turn = make_turn(THOUGHTFUL)
    message = client.messages.create(**ASK, tools=[RUN], system="Be brief.")
    assert message.id == "msg_t0" and message.model == "policy" and message.role == "assistant"
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    thinking, text, *calls = message.content
    assert thinking.thinking == "2+3" and thinking.signature and text.text == "It is five."
    assert [(call.id, call.name, call.input) for call in calls] == [("call-0-0", "run", CALL.arguments), ("call-0-1", "stop", {})]
    assert (message.stop_reason, message.stop_sequence) == ("tool_use", None)
    usage = message.usage
    # 10 prompt tokens, 4 of them from the cache, which this API counts apart.
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens, usage.output_tokens) == (6, 4, 0, 3)
    assert server.requests[0].messages == (Message(role=Role.SYSTEM, content="Be brief."), ASKED)
    assert server.requests[0].tools == (ToolSchema(name="run", description="Runs it.", parameters={"type": "object"}),)
    assert server.requests[0].sampling.max_tokens == 64


def test_the_official_client_puts_a_stream_together_to_the_same_answer(server, client):
    server.turn = make_turn(THOUGHTFUL)
    whole = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        streamed = stream.get_final_message()
    assert streamed.model_dump(include=set(whole.model_dump())) == whole.model_dump()


def test_a_stream_has_the_events_of_the_api_in_order(server, client):
    server.turn = make_turn(assistant("five", calls=[CALL]))
    events = list(client.messages.create(**ASK, stream=True))
    assert [event.type for event in events] == [
        "message_start",
        *["content_block_start", "content_block_delta", "content_block_stop"] * 2,
        "message_delta",
        "message_stop",
    ]
    assert [event.delta.type for event in events if event.type == "content_block_delta"] == ["text_delta", "input_json_delta"]
    assert [event.index for event in events if event.type == "content_block_start"] == [0, 1]
    assert events[-2].delta.stop_reason == "tool_use" and events[-2].usage.output_tokens == 3


@pytest.mark.parametrize(
    ("end", "stop_text", "reason"),
    [
        (TurnEnd.STOP, None, "end_turn"),
        (TurnEnd.STOP, "END", "stop_sequence"),
        (TurnEnd.LENGTH, None, "max_tokens"),
        (TurnEnd.TOOL_CALLS, None, "tool_use"),
        (TurnEnd.TOOL_CALLS, "END", "tool_use"),
    ],
)
def test_the_end_of_a_turn_has_this_apis_word(server, client, end, stop_text, reason):
    calls = [CALL] if end is TurnEnd.TOOL_CALLS else []
    server.turn = make_turn(assistant("five", calls=calls), end=end, stop_text=stop_text)
    message = client.messages.create(**ASK)
    with client.messages.stream(**ASK) as stream:
        streamed = stream.get_final_message()
    expected = (reason, "END" if reason == "stop_sequence" else None)
    assert (message.stop_reason, message.stop_sequence) == (streamed.stop_reason, streamed.stop_sequence) == expected


def test_an_answer_without_a_word_has_no_blocks_and_can_be_sent_back(server, client):
    server.turn = make_turn(assistant())
    message = client.messages.create(**ASK)
    assert message.content == []
    client.messages.create(**ASK | {"messages": [USER, message.to_param(), USER]})
    assert server.requests[-1].messages == (ASKED, assistant(), ASKED)


def test_results_of_calls_come_before_what_the_user_says():
    results = [result(content="5"), result(tool_use_id="d", content=[TEXT, TEXT], is_error=True), result(tool_use_id="e")]
    call = {"type": "tool_use", "id": "c", "name": "run", "input": {"code": "2+3"}}
    request = read(messages=[USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [*results, TEXT, TEXT]}])
    assert request.messages == (
        ASKED,
        assistant(calls=[ToolCall(id="c", name="run", arguments={"code": "2+3"})]),
        Message(role=Role.TOOL, content="5", tool_call_id="c", name="run"),
        Message(role=Role.TOOL, content="and now?and now?", tool_call_id="d"),
        Message(role=Role.TOOL, content="", tool_call_id="e"),
        Message(role=Role.USER, content="and now?and now?"),
    )


def test_system_may_be_blocks_and_stand_between_messages():
    request = read(system=[{"type": "text", "text": "Be "}, {"type": "text", "text": "brief.", "cache_control": None}])
    assert request.messages == (Message(role=Role.SYSTEM, content="Be brief."), ASKED)
    assert read(system="").messages == (ASKED,)
    assert read(messages=[USER, {"role": "system", "content": "Now."}]).messages == (ASKED, Message(role=Role.SYSTEM, content="Now."))


def test_tool_choice_none_takes_the_tools_away():
    assert read(tools=[RUN], tool_choice={"type": "none"}).tools == ()
    assert read(tools=[RUN | {"type": "custom"}], tool_choice={"type": "auto"}).tools == read(tools=[RUN]).tools != ()


@pytest.mark.parametrize(
    ("sent", "asked"),
    [
        ({"temperature": 0.2, "top_k": 5, "top_p": 0.5}, {"temperature": 0.2, "top_k": 5, "top_p": 0.5}),
        ({"temperature": 1, "top_p": 1.0, "thinking": {"type": "disabled"}}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, {"parallel_tool_calls": False}),
        ({"metadata": {"user_id": "u"}, "service_tier": "auto", "mcp_servers": []}, {}),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}, {}),
    ],
)
def test_what_is_asked_of_sampling_is_handed_on_unless_it_is_neutral(sent, asked):
    assert read(**sent).sampling.others == asked


def test_stop_sequences_are_asked():
    assert read(stop_sequences=["a", "b", "c", "d", "e"]).sampling.stop == ("a", "b", "c", "d", "e")


def test_an_error_reaches_the_official_client_and_names_the_parameter(client):
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**ASK | {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]})
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert "messages[0].content[0]" in caught.value.body["error"]["message"]


@pytest.mark.parametrize(
    ("status", "kind", "type"),
    [
        (401, anthropic.AuthenticationError, "authentication_error"),
        (404, anthropic.NotFoundError, "not_found_error"),
        (429, anthropic.RateLimitError, "rate_limit_error"),
        (500, anthropic.InternalServerError, "api_error"),
        (503, anthropic.ServiceUnavailableError, "overloaded_error"),
        (504, anthropic.GatewayTimeoutError, "timeout_error"),
    ],
)
def test_an_error_of_the_session_reaches_the_official_client(server, client, status, kind, type):
    server.error = SessionRequestError(status=status, code="why", message="because", param="turn")
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.messages.create(**ASK)
    assert isinstance(caught.value, kind)
    assert caught.value.body["error"] == {"type": type, "message": "turn: because"}


def test_an_error_inside_a_stream_is_raised_by_the_official_client(server, client):
    server.stream_error = SessionRequestError(status=503, code="engine_lost", message="the engine is gone")
    with pytest.raises(anthropic.APIStatusError, match="the engine is gone"):
        list(client.messages.create(**ASK, stream=True))


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"max_tokens": None}, "missing_required_parameter", "max_tokens"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"messages": None}, "missing_required_parameter", "messages"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "tool", "content": "5"}]}, "invalid_value", "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "missing_required_parameter", "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "invalid_value", "messages[0].content"),
        ({"messages": [USER, {"role": "assistant", "content": "It is"}]}, "unsupported_value", "messages"),
        (said("hi"), "invalid_value", "messages[0].content[0]"),
        (said({"type": "image", "source": {}}), "unsupported_value", "messages[0].content[0]"),
        (said({"type": "document", "source": {}}), "unsupported_value", "messages[0].content[0]"),
        (said({"type": "text"}), "missing_required_parameter", "messages[0].content[0].text"),
        (said({"type": "text", "text": "\udfff"}), "invalid_value", "messages[0].content[0].text"),
        (said({"type": "tool_result"}), "missing_required_parameter", "messages[0].content[0].tool_use_id"),
        (said(result(content=[{"type": "image", "source": {}}])), "unsupported_value", "messages[0].content[0].content[0]"),
        (said(TEXT, result(content="5")), "invalid_value", "messages[0].content[1]"),
        (said({"type": "tool_use", "id": "c", "name": "run", "input": {}}), "unsupported_value", "messages[0].content[0]"),
        (said({"type": "redacted_thinking", "data": ""}, role="assistant"), "unsupported_value", "messages[0].content[0]"),
        (said({"type": "server_tool_use"}, role="assistant"), "unsupported_value", "messages[0].content[0]"),
        (said({"type": "thinking", "signature": ""}, role="assistant"), "missing_required_parameter", "messages[0].content[0].thinking"),
        (
            said({"type": "tool_use", "id": "c", "name": "run"}, role="assistant"),
            "missing_required_parameter",
            "messages[0].content[0].input",
        ),
        (
            said({"type": "tool_use", "id": "c", "name": "run", "input": "{}"}, role="assistant"),
            "invalid_value",
            "messages[0].content[0].input",
        ),
        (
            said({"type": "tool_use", "id": "c", "name": "run", "input": {"\ud800": 1}}, role="assistant"),
            "invalid_value",
            "messages[0].content[0].input",
        ),
        (said({"type": "tool_use", "name": "run", "input": {}}, role="assistant"), "invalid_value", "messages[0].content[0].id"),
        (said({"type": "tool_use", "id": "c", "input": {}}, role="assistant"), "invalid_value", "messages[0].content[0].name"),
        ({"system": 5}, "invalid_value", "system"),
        ({"system": [{"type": "image"}]}, "unsupported_value", "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "unsupported_value", "tools[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "unsupported_value", "tools[0].type"),
        ({"tools": [{"name": "run"}]}, "missing_required_parameter", "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "missing_required_parameter", "tools[0].name"),
        ({"tools": [RUN, RUN]}, "invalid_value", "tools"),
        ({"tool_choice": {"type": "any"}}, "unsupported_value", "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "run"}}, "unsupported_value", "tool_choice"),
        ({"tool_choice": {"type": "required"}}, "invalid_value", "tool_choice.type"),
        ({"tool_choice": "auto"}, "invalid_value", "tool_choice"),
        ({"stop_sequences": [""]}, "invalid_value", "stop_sequences"),
        ({"stream": 1}, "invalid_value", "stream"),
        ({"thinking": "enabled"}, "invalid_value", "thinking"),
        ({"temperature": "hot"}, "invalid_value", "temperature"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "unsupported_value", "output_config.format"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "unsupported_parameter", "context_management"),
        ({"mcp_servers": [{"url": "http://a"}]}, "unsupported_parameter", "mcp_servers"),
        ({"container": "c"}, "unsupported_parameter", "container"),
        ({"n": 1}, "unknown_parameter", "n"),
    ],
)
def test_a_bad_request_is_refused_with_its_code_and_parameter(change, code, param):
    assert outcome_of(AnthropicMessages(), ASK | change) == (400, code, param)
