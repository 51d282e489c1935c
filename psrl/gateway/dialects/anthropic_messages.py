"""Anthropic's messages.

A user message of this API may answer several calls and then say something: it becomes one tool message each, then a user message.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from psrl.errors import SessionRequestError
from psrl.gateway.dialects.base import AskedSampling, ChatRequest, ChatTurn, History, TurnEnd, server_sent_event
from psrl.gateway.dialects.fields import (
    IGNORED,
    NUMBER,
    READ,
    REFUSED,
    Parameter,
    ReadBefore,
    Use,
    call_of,
    choice_of,
    content_text,
    conversation_of,
    distinct_tools,
    flag_of,
    json_object,
    json_text,
    list_of,
    name_of,
    object_of,
    part_text,
    positive_of,
    read_parameters,
    refuse,
    required,
    stop_texts,
    text_of,
    tool_of,
    unsupported,
)
from psrl.types import Message, Role, ToolCall, ToolSchema

NO_EDITS: tuple[Any, ...] = ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})
"""Ways to say that the server changes nothing of the history."""
PARAMETERS = MappingProxyType(
    {
        **dict.fromkeys(("messages", "model", "max_tokens", "system", "tools", "tool_choice", "stop_sequences", "stream"), READ),
        "output_config": READ,
        "temperature": Parameter(Use.SAMPLING, (1,), NUMBER),
        "top_p": Parameter(Use.SAMPLING, (1,), NUMBER),
        "top_k": Parameter(Use.SAMPLING, (0, -1), (int,)),
        "thinking": Parameter(Use.SAMPLING, ({"type": "disabled"},), (dict,)),
        "context_management": Parameter(Use.FIXED, NO_EDITS),
        "mcp_servers": Parameter(Use.FIXED, ([],)),
        **dict.fromkeys(("container", "compaction", "fallbacks", "thread", "output_format"), REFUSED),
        **dict.fromkeys(("metadata", "service_tier", "cache_control", "inference_geo", "speed", "diagnostics"), IGNORED),
        **dict.fromkeys(("user_profile_id", "workspace_id", "betas", "billing_policy"), IGNORED),
    }
)
STOP_REASONS = {TurnEnd.STOP: "end_turn", TurnEnd.TOOL_CALLS: "tool_use", TurnEnd.LENGTH: "max_tokens"}
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class AnthropicMessages:
    """See `Dialect`."""

    path = "/v1/messages"
    keep_alive = server_sent_event({"type": "ping"}, name="ping")

    def read_request(self, body: Any, *, history: History, read_before: ReadBefore) -> ChatRequest:
        """See `Dialect`."""
        fields, others = read_parameters(body, PARAMETERS)
        required(fields, "max_tokens")
        system = content_text(fields.get("system", ""), "system", kinds=("text",))
        messages = [Message(role=Role.SYSTEM, content=system)] if system else []
        raw_messages = list_of(required(fields, "messages"), "messages")
        messages += read_before.read(raw_messages, lambda raw, index: _messages(raw, f"messages[{index}]"))
        config = object_of(fields.get("output_config", {}), "output_config")
        if config.get("format") is not None:
            unsupported("output_config.format", "output_config.format is not supported: only text is")
        effort = {} if config.get("effort") is None else {"reasoning_effort": config["effort"]}
        tools = distinct_tools(_tool(raw, f"tools[{index}]") for index, raw in enumerate(list_of(fields.get("tools", []), "tools")))
        choice = object_of(fields.get("tool_choice", {"type": "auto"}), "tool_choice")
        if choice.get("type") in ("any", "tool"):
            unsupported("tool_choice", "tool_choice can be auto or none: a turn cannot be forced to call a tool")
        allows_calls = choice_of(choice.get("type"), "tool_choice.type", ("auto", "none")) == "auto"
        one_call = flag_of(choice, "disable_parallel_tool_use", "tool_choice.disable_parallel_tool_use")
        return ChatRequest(
            messages=conversation_of(messages, "messages"),
            tools=tools if allows_calls else (),
            sampling=AskedSampling(
                max_tokens=positive_of(fields, "max_tokens"),
                stop=stop_texts(fields.get("stop_sequences"), "stop_sequences"),
                others=others | effort | ({"parallel_tool_calls": False} if one_call else {}),
            ),
            model=text_of(fields.get("model", ""), "model"),
            wants_stream=flag_of(fields, "stream"),
        )

    def write_answer(self, turn: ChatTurn, request: ChatRequest) -> dict[str, Any]:
        """See `Dialect`."""
        ending = {"stop_reason": _stop_reason(turn), "stop_sequence": _stop_sequence(turn)}
        return {**_head(turn, request), "content": _blocks(turn), **ending, "usage": _usage(turn, len(turn.generation.token_ids))}

    def write_stream(self, turn: ChatTurn, request: ChatRequest) -> Iterator[bytes]:
        """See `Dialect`."""
        begun = {**_head(turn, request), "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(turn, 0)}
        yield _event("message_start", message=begun)
        for index, block in enumerate(_blocks(turn)):
            empty, deltas = _opened(block)
            yield _event("content_block_start", index=index, content_block=empty)
            for delta in deltas:
                yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        ending = {"stop_reason": _stop_reason(turn), "stop_sequence": _stop_sequence(turn)}
        yield _event("message_delta", delta=ending, usage=_usage(turn, len(turn.generation.token_ids)))
        yield _event("message_stop")

    def write_error(self, error: SessionRequestError) -> dict[str, Any]:
        """See `Dialect`. This API has no field for the parameter, so the text names it."""
        kind = ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
        message = error.message if error.param is None or error.param in error.message else f"{error.param}: {error.message}"
        return {"type": "error", "error": {"type": kind, "message": message}}

    def write_stream_error(self, error: SessionRequestError) -> bytes:
        """See `Dialect`."""
        return server_sent_event(self.write_error(error), name="error")


def _messages(raw: Any, param: str) -> list[Message]:
    """What one message of the API says: several messages where it answers calls."""
    message = object_of(raw, param)
    role = Role(choice_of(required(message, "role", f"{param}.role"), f"{param}.role", ("user", "assistant", "system")))
    content = required(message, "content", f"{param}.content")
    if role is Role.ASSISTANT:
        return [_answer(content, f"{param}.content")]
    if role is Role.SYSTEM or isinstance(content, str):
        return [Message(role=role, content=content_text(content, f"{param}.content", kinds=("text",)))]
    results, texts = [], []
    for index, raw_block in enumerate(list_of(content, f"{param}.content")):
        where = f"{param}.content[{index}]"
        block = object_of(raw_block, where)
        if block.get("type") != "tool_result":
            texts.append(part_text(block, where, kinds=("text", "tool_result")))
            continue
        if texts:
            refuse(where, f"{where}: tool_result blocks come before text")
        identity = name_of(required(block, "tool_use_id", f"{where}.tool_use_id"), f"{where}.tool_use_id")
        said = "" if block.get("content") is None else content_text(block["content"], f"{where}.content", kinds=("text",))
        results.append(Message(role=Role.TOOL, content=said, tool_call_id=identity))
    return [*results, Message(role=role, content="".join(texts))] if texts or not results else results


def _answer(content: Any, param: str) -> Message:
    """An assistant's message. A thinking block's signature is not checked."""
    if isinstance(content, str):
        return Message(role=Role.ASSISTANT, content=text_of(content, param))
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for index, raw_block in enumerate(list_of(content, param)):
        where = f"{param}[{index}]"
        block = object_of(raw_block, where)
        if block.get("type") == "thinking":
            thoughts.append(text_of(required(block, "thinking", f"{where}.thinking"), f"{where}.thinking"))
        elif block.get("type") == "tool_use":
            arguments = json_object(required(block, "input", f"{where}.input"), f"{where}.input")
            calls.append(call_of(block.get("id"), block.get("name"), arguments, where))
        else:
            texts.append(part_text(block, where, kinds=("text", "thinking", "tool_use")))
    return Message(role=Role.ASSISTANT, content="".join(texts), tool_calls=tuple(calls), reasoning="".join(thoughts) if thoughts else None)


def _tool(raw: Any, param: str) -> ToolSchema:
    tool = object_of(raw, param)
    if tool.get("type") not in (None, "custom"):
        unsupported(f"{param}.type", f"{param} is of type {tool['type']!r:.40}: tools that a server runs are not supported")
    required(tool, "input_schema", f"{param}.input_schema")
    return tool_of(tool, param, schema="input_schema")


def _head(turn: ChatTurn, request: ChatRequest) -> dict[str, Any]:
    return {"id": f"msg_{turn.id}", "type": "message", "role": "assistant", "model": request.model}


def _blocks(turn: ChatTurn) -> list[dict[str, Any]]:
    """Content blocks; none where the policy said nothing, because this API knows no empty text."""
    answer = turn.answer
    blocks: list[dict[str, Any]] = []
    if answer.reasoning is not None:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": turn.id})
    if answer.content:
        blocks.append({"type": "text", "text": answer.content, "citations": None})
    return blocks + [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in turn.calls]


def _opened(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as a stream begins it, and the deltas that fill it."""
    if block["type"] == "thinking":
        deltas = [{"type": "thinking_delta", "thinking": block["thinking"]}, {"type": "signature_delta", "signature": block["signature"]}]
        return {**block, "thinking": "", "signature": ""}, deltas
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": json_text(block["input"])}]


def _stop_sequence(turn: ChatTurn) -> str | None:
    return turn.stop_text if turn.end is TurnEnd.STOP else None


def _stop_reason(turn: ChatTurn) -> str:
    return STOP_REASONS[turn.end] if _stop_sequence(turn) is None else "stop_sequence"


def _usage(turn: ChatTurn, output_tokens: int) -> dict[str, Any]:
    """Counts as this API has them: `input_tokens` are those that no cache held."""
    generation = turn.generation
    return {
        "input_tokens": generation.prompt_tokens - generation.cached_tokens,
        "cache_read_input_tokens": generation.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": output_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return server_sent_event({"type": kind, **fields}, name=kind)
