"""OpenAI's chat completions, as its own clients and those of other servers of this API speak it.

Answers carry the reasoning in `reasoning_content`; `return_token_ids` is psrl's own parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from psrl.errors import SessionRequestError
from psrl.gateway.dialects.base import AskedSampling, ChatRequest, ChatTurn, History, server_sent_event
from psrl.gateway.dialects.fields import (
    IGNORED,
    NUMBER,
    READ,
    REFUSED,
    Parameter,
    ReadBefore,
    Use,
    arguments_of,
    call_of,
    choice_of,
    content_text,
    conversation_of,
    distinct_tools,
    flag_of,
    json_text,
    list_of,
    name_of,
    object_of,
    positive_of,
    read_parameters,
    required,
    stop_texts,
    text_of,
    tool_of,
    unsupported,
)
from psrl.types import Message, Role, ToolCall, ToolSchema

MAX_STOPS = 4
ROLES = {"system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT, "tool": Role.TOOL}
PARAMETERS = MappingProxyType(
    {
        **dict.fromkeys(("messages", "model", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop"), READ),
        **dict.fromkeys(("stream", "stream_options", "logprobs", "return_token_ids"), READ),
        "temperature": Parameter(Use.SAMPLING, (1,), NUMBER),
        "top_p": Parameter(Use.SAMPLING, (1,), NUMBER),
        "top_k": Parameter(Use.SAMPLING, (0, -1), (int,)),
        "min_p": Parameter(Use.SAMPLING, (0,), NUMBER),
        "min_tokens": Parameter(Use.SAMPLING, (0,), (int,)),
        "presence_penalty": Parameter(Use.SAMPLING, (0,), NUMBER),
        "frequency_penalty": Parameter(Use.SAMPLING, (0,), NUMBER),
        "repetition_penalty": Parameter(Use.SAMPLING, (1,), NUMBER),
        "logit_bias": Parameter(Use.SAMPLING, ({},), (dict,)),
        "seed": Parameter(Use.SAMPLING, (), (int,)),
        "parallel_tool_calls": Parameter(Use.SAMPLING, (True,), (bool,)),
        "reasoning_effort": Parameter(Use.SAMPLING, (), (str,)),
        "verbosity": Parameter(Use.SAMPLING, ("medium",), (str,)),
        "n": Parameter(Use.FIXED, (1,)),
        "response_format": Parameter(Use.FIXED, ({"type": "text"},)),
        "modalities": Parameter(Use.FIXED, (["text"],)),
        "top_logprobs": Parameter(Use.FIXED, (0,)),
        **dict.fromkeys(("functions", "function_call", "audio", "prediction", "web_search_options", "moderation"), REFUSED),
        **dict.fromkeys(("metadata", "user", "store", "service_tier", "safety_identifier"), IGNORED),
        **dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), IGNORED),
    }
)


class OpenAIChat:
    """See `Dialect`."""

    path = "/v1/chat/completions"
    keep_alive = b": keep-alive\n\n"

    def read_request(self, body: Any, *, history: History, read_before: ReadBefore) -> ChatRequest:
        """See `Dialect`."""
        fields, others = read_parameters(body, PARAMETERS)
        raw_messages = list_of(required(fields, "messages"), "messages")
        messages = read_before.read(raw_messages, lambda raw, index: (_message(raw, f"messages[{index}]"),))
        tools = tuple(_tool(raw, f"tools[{index}]") for index, raw in enumerate(list_of(fields.get("tools", []), "tools")))
        limits = [limit for name in ("max_tokens", "max_completion_tokens") if (limit := positive_of(fields, name)) is not None]
        stream_options = object_of(fields.get("stream_options", {}), "stream_options")
        return ChatRequest(
            messages=conversation_of(messages, "messages"),
            tools=distinct_tools(tools) if allows_calls(fields) else (),
            sampling=AskedSampling(
                max_tokens=min(limits, default=None), stop=stop_texts(fields.get("stop"), "stop", most=MAX_STOPS), others=others
            ),
            model=text_of(fields.get("model", ""), "model"),
            wants_stream=flag_of(fields, "stream"),
            wants_usage=flag_of(stream_options, "include_usage", "stream_options.include_usage"),
            wants_logprobs=flag_of(fields, "logprobs"),
            wants_token_ids=flag_of(fields, "return_token_ids"),
        )

    def write_answer(self, turn: ChatTurn, request: ChatRequest) -> dict[str, Any]:
        """See `Dialect`."""
        answer = turn.answer
        message: dict[str, Any] = {"role": "assistant", "content": answer.content if answer.content or not turn.calls else None}
        if answer.reasoning is not None:
            message["reasoning_content"] = answer.reasoning
        if turn.calls:
            message["tool_calls"] = _calls(turn)
        choice = {"index": 0, "message": message, **_end(turn, request)}
        return {**_head(turn, request, "chat.completion"), "choices": [choice], "usage": _usage(turn)}

    def write_stream(self, turn: ChatTurn, request: ChatRequest) -> Iterator[bytes]:
        """See `Dialect`."""
        head = {**_head(turn, request, "chat.completion.chunk"), **({"usage": None} if request.wants_usage else {})}
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        if turn.answer.reasoning is not None:
            deltas.append({"reasoning_content": turn.answer.reasoning})
        if turn.answer.content:
            deltas.append({"content": turn.answer.content})
        deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(_calls(turn))]
        for delta in deltas:
            yield server_sent_event({**head, "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]})
        yield server_sent_event({**head, "choices": [{"index": 0, "delta": {}, **_end(turn, request)}]})
        if request.wants_usage:
            yield server_sent_event({**head, "choices": [], "usage": _usage(turn)})
        yield b"data: [DONE]\n\n"

    def write_error(self, error: SessionRequestError) -> dict[str, Any]:
        """See `Dialect`."""
        return openai_error(error)

    def write_stream_error(self, error: SessionRequestError) -> bytes:
        """See `Dialect`."""
        return server_sent_event(openai_error(error))


def openai_error(error: SessionRequestError) -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    kind = "rate_limit_error" if error.status == 429 else "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def allows_calls(fields: dict[str, Any]) -> bool:
    """Read `tool_choice`."""
    choice = fields.get("tool_choice", "auto")
    if choice == "required" or isinstance(choice, dict):
        unsupported("tool_choice", "tool_choice can be auto or none: a turn cannot be forced to call a tool")
    return choice_of(choice, "tool_choice", ("auto", "none")) == "auto"


def logprob_entries(turn: ChatTurn) -> list[dict[str, Any]]:
    """Text and logprob of every sampled token, those of reasoning, calls and the turn's end included."""
    return [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        for text, logprob in zip(turn.token_texts, turn.generation.logprobs, strict=True)
    ]


def _message(raw: Any, param: str) -> Message:
    """One message; fields that agents and other servers add beside the API's are not read."""
    message = object_of(raw, param)
    role = ROLES[choice_of(required(message, "role", f"{param}.role"), f"{param}.role", ROLES)]
    for field in ("function_call", "audio", "refusal"):
        if message.get(field) is not None:
            unsupported(f"{param}.{field}", f"{param}.{field} is not supported")
    content = message.get("content")
    if content is None and role is Role.ASSISTANT:
        content = ""
    text = content_text(required({"content": content}, "content", f"{param}.content"), f"{param}.content", kinds=("text",))
    if role is Role.TOOL:
        name = message.get("name")
        return Message(
            role=role,
            content=text,
            tool_call_id=name_of(required(message, "tool_call_id", f"{param}.tool_call_id"), f"{param}.tool_call_id"),
            name=None if name is None else name_of(name, f"{param}.name"),
        )
    if role is not Role.ASSISTANT:
        return Message(role=role, content=text)
    field = "reasoning" if message.get("reasoning_content") is None else "reasoning_content"
    reasoning = message.get(field)
    calls = [] if message.get("tool_calls") is None else message["tool_calls"]
    return Message(
        role=role,
        content=text,
        reasoning=None if reasoning is None else text_of(reasoning, f"{param}.{field}"),
        tool_calls=tuple(_call(call, f"{param}.tool_calls[{index}]") for index, call in enumerate(list_of(calls, f"{param}.tool_calls"))),
    )


def _call(raw: Any, param: str) -> ToolCall:
    call = object_of(raw, param)
    function = _function(call, param)
    arguments = arguments_of(required(function, "arguments", f"{param}.function.arguments"), f"{param}.function.arguments")
    return call_of(call.get("id"), function.get("name"), arguments, param, name_field="function.name")


def _tool(raw: Any, param: str) -> ToolSchema:
    return tool_of(_function(object_of(raw, param), param), f"{param}.function", schema="parameters")


def _function(raw: dict[str, Any], param: str) -> dict[str, Any]:
    """What a tool or a call says of its function."""
    if raw.get("type", "function") != "function":
        unsupported(f"{param}.type", f"{param} is of type {raw['type']!r:.40}: only functions are supported")
    return object_of(required(raw, "function", f"{param}.function"), f"{param}.function")


def _head(turn: ChatTurn, request: ChatRequest, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn.id}", "object": kind, "created": turn.created, "model": request.model}


def _calls(turn: ChatTurn) -> list[dict[str, Any]]:
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json_text(call.arguments)}} for call in turn.calls
    ]


def _end(turn: ChatTurn, request: ChatRequest) -> dict[str, Any]:
    """What a choice says of its end: in a stream, its last chunk."""
    end: dict[str, Any] = {"logprobs": None, "finish_reason": turn.end.value}
    if request.wants_logprobs:
        end["logprobs"] = {"content": logprob_entries(turn), "refusal": None}
    if request.wants_token_ids:
        generation = turn.generation
        end |= {
            "token_ids": generation.token_ids,
            "token_logprobs": generation.logprobs,
            "policy_versions": generation.policy_versions,
        }
    return end


def _usage(turn: ChatTurn) -> dict[str, Any]:
    generation = turn.generation
    return {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": len(generation.token_ids),
        "total_tokens": generation.prompt_tokens + len(generation.token_ids),
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }
