"""OpenAI's responses: a conversation as a list of items, kept by the server where the client names the response that it follows.

An answer is up to three kinds of items (reasoning, message, function calls), read back as one message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    text_of,
    tool_of,
    unsupported,
)
from psrl.gateway.dialects.openai_chat import allows_calls, logprob_entries, openai_error
from psrl.types import Message, Role, ToolSchema

ID_PREFIX = "resp_"
LOGPROBS = "message.output_text.logprobs"
ROLES = {"system": Role.SYSTEM, "developer": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}
PARAMETERS = MappingProxyType(
    {
        **dict.fromkeys(("input", "instructions", "previous_response_id", "model", "tools", "tool_choice"), READ),
        **dict.fromkeys(("max_output_tokens", "stream", "text", "reasoning", "include"), READ),
        "temperature": Parameter(Use.SAMPLING, (1,), NUMBER),
        "top_p": Parameter(Use.SAMPLING, (1,), NUMBER),
        "parallel_tool_calls": Parameter(Use.SAMPLING, (True,), (bool,)),
        "background": Parameter(Use.FIXED, (False,)),
        "top_logprobs": Parameter(Use.FIXED, (0,)),
        **dict.fromkeys(("conversation", "prompt", "context_management", "max_tool_calls", "moderation", "image"), REFUSED),
        **dict.fromkeys(("metadata", "client_metadata", "user", "store", "service_tier", "safety_identifier", "truncation"), IGNORED),
        **dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "stream_options"), IGNORED),
        **dict.fromkeys(("background_options", "access_programs"), IGNORED),
    }
)


class OpenAIResponses:
    """See `Dialect`."""

    path = "/v1/responses"
    keep_alive = b": keep-alive\n\n"

    def read_request(self, body: Any, *, history: History, read_before: ReadBefore) -> ChatRequest:
        """See `Dialect`. The first system message of the response that this one follows gives way to this one's `instructions`."""
        fields, others = read_parameters(body, PARAMETERS)
        earlier: list[Message] = []
        if "previous_response_id" in fields:
            earlier += history(text_of(fields["previous_response_id"], "previous_response_id").removeprefix(ID_PREFIX))
        if "instructions" in fields:
            replaced = 1 if earlier and earlier[0].role is Role.SYSTEM else 0
            earlier[:replaced] = [Message(role=Role.SYSTEM, content=text_of(fields["instructions"], "instructions"))]
        tools = distinct_tools(_tool(raw, f"tools[{index}]") for index, raw in enumerate(list_of(fields.get("tools", []), "tools")))
        messages = [*earlier, *_messages(required(fields, "input"))]
        return ChatRequest(
            messages=conversation_of(read_before.read(messages, lambda message, _: (message,)), "input"),
            tools=tools if allows_calls(fields) else (),
            sampling=AskedSampling(max_tokens=positive_of(fields, "max_output_tokens"), others=others | _asked_in_objects(fields)),
            model=text_of(fields.get("model", ""), "model"),
            wants_stream=flag_of(fields, "stream"),
            wants_usage=True,
            wants_logprobs=LOGPROBS in list_of(fields.get("include", []), "include"),
        )

    def write_answer(self, turn: ChatTurn, request: ChatRequest) -> dict[str, Any]:
        """See `Dialect`."""
        is_cut = turn.end is TurnEnd.LENGTH
        return {
            **_head(turn, request),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": _items(turn, request),
            "usage": _usage(turn),
        }

    def write_stream(self, turn: ChatTurn, request: ChatRequest) -> Iterator[bytes]:
        """See `Dialect`."""
        for number, event in enumerate(self._events(turn, request)):
            yield server_sent_event({**event, "sequence_number": number}, name=event["type"])

    def write_error(self, error: SessionRequestError) -> dict[str, Any]:
        """See `Dialect`."""
        return openai_error(error)

    def write_stream_error(self, error: SessionRequestError) -> bytes:
        """See `Dialect`. Clients that do not know the event find `error` in it, and raise."""
        words = {"code": error.code, "message": error.message, "param": error.param}
        return server_sent_event({"type": "error", **words, "sequence_number": 0, **openai_error(error)}, name="error")

    def _events(self, turn: ChatTurn, request: ChatRequest) -> Iterator[dict[str, Any]]:
        begun = {**_head(turn, request), "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        yield {"type": "response.created", "response": begun}
        yield {"type": "response.in_progress", "response": begun}
        for index, item in enumerate(_items(turn, request)):
            yield from _item_events(item, index)
        answer = self.write_answer(turn, request)
        yield {"type": f"response.{answer['status']}", "response": answer}


def _asked_in_objects(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What `text` and `reasoning` ask of sampling."""
    text = object_of(fields.get("text", {}), "text")
    if text.get("format") not in (None, {"type": "text"}):
        unsupported("text.format", "text.format is not supported: only text is")
    asked = {"verbosity": text.get("verbosity"), "reasoning_effort": object_of(fields.get("reasoning", {}), "reasoning").get("effort")}
    return {name: value for name, value in asked.items() if value is not None and (name, value) != ("verbosity", "medium")}


def _messages(raw: Any) -> list[Message]:
    """The conversation that `input` holds. Items of one answer become one message."""
    if isinstance(raw, str):
        return [Message(role=Role.USER, content=text_of(raw, "input"))]
    messages: list[Message] = []
    for index, entry in enumerate(list_of(raw, "input")):
        param = f"input[{index}]"
        item = object_of(entry, param)
        kind = "message" if item.get("type") is None else item["type"]
        message = _message(item, kind, param)
        last = messages[-1] if messages else message
        is_one_answer = last is not message and last.role is message.role is Role.ASSISTANT
        if is_one_answer and (kind == "function_call" or not (last.content or last.tool_calls)):
            messages[-1] = _joined(last, message)
        else:
            messages.append(message)
    return messages


def _joined(first: Message, second: Message) -> Message:
    """One answer of two items."""
    thoughts = [message.reasoning for message in (first, second) if message.reasoning is not None]
    return Message(
        role=Role.ASSISTANT,
        content=first.content + second.content,
        tool_calls=first.tool_calls + second.tool_calls,
        reasoning="".join(thoughts) if thoughts else None,
    )


def _message(item: dict[str, Any], kind: Any, param: str) -> Message:
    """What one item says, as a message of its own."""
    if kind == "message":
        role = ROLES[choice_of(required(item, "role", f"{param}.role"), f"{param}.role", ROLES)]
        kinds = ("output_text", "input_text") if role is Role.ASSISTANT else ("input_text",)
        return Message(role=role, content=content_text(required(item, "content", f"{param}.content"), f"{param}.content", kinds=kinds))
    if kind == "function_call":
        arguments = arguments_of(required(item, "arguments", f"{param}.arguments"), f"{param}.arguments")
        return Message(
            role=Role.ASSISTANT, tool_calls=(call_of(item.get("call_id"), item.get("name"), arguments, param, id_field="call_id"),)
        )
    if kind == "function_call_output":
        return Message(
            role=Role.TOOL,
            content=content_text(required(item, "output", f"{param}.output"), f"{param}.output", kinds=("input_text",)),
            tool_call_id=name_of(required(item, "call_id", f"{param}.call_id"), f"{param}.call_id"),
        )
    if kind == "reasoning":
        content = item.get("content")
        thought = None if content is None else content_text(content, f"{param}.content", kinds=("reasoning_text",))
        return Message(role=Role.ASSISTANT, reasoning=thought)
    unsupported(
        f"{param}.type", f"{param} is of type {kind!r:.40}: only message, function_call, function_call_output and reasoning are read"
    )


def _tool(raw: Any, param: str) -> ToolSchema:
    tool = object_of(raw, param)
    if required(tool, "type", f"{param}.type") != "function":
        unsupported(f"{param}.type", f"{param} is of type {tool['type']!r:.40}: only functions are supported")
    return tool_of(tool, param, schema="parameters")


def _head(turn: ChatTurn, request: ChatRequest) -> dict[str, Any]:
    """What a response says from its beginning. What the client asked of sampling is not repeated: it may have been overridden."""
    tools = [
        {"type": "function", "name": tool.name, "description": tool.description, "parameters": tool.parameters, "strict": False}
        for tool in request.tools
    ]
    return {
        "id": f"{ID_PREFIX}{turn.id}",
        "object": "response",
        "created_at": turn.created,
        "model": request.model,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": tools,
        "text": {"format": {"type": "text"}},
    }


def _items(turn: ChatTurn, request: ChatRequest) -> list[dict[str, Any]]:
    """The answer's items. There is a message or a call in every answer, so what a client sends back always shows that there was one."""
    answer = turn.answer
    items: list[dict[str, Any]] = []
    if answer.reasoning is not None:
        thought = {"type": "reasoning_text", "text": answer.reasoning}
        items.append({"type": "reasoning", "id": f"rs_{turn.id}", "summary": [], "content": [thought], "status": "completed"})
    status = "incomplete" if turn.end is TurnEnd.LENGTH else "completed"
    if answer.content or not turn.calls:
        entries = logprob_entries(turn) if request.wants_logprobs else []
        said = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": entries}
        items.append({"type": "message", "id": f"msg_{turn.id}", "role": "assistant", "status": status, "content": [said]})
    for index, call in enumerate(turn.calls):
        words = {"call_id": call.id, "name": call.name, "arguments": json_text(call.arguments)}
        items.append({"type": "function_call", "id": f"fc_{turn.id}-{index}", **words, "status": status})
    return items


def _item_events(item: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
    """A whole item as a stream tells it: begun, filled by one delta, done."""
    at = {"output_index": index, "item_id": item["id"]}
    is_call = item["type"] == "function_call"
    begun = {**item, "status": "in_progress", "arguments" if is_call else "content": "" if is_call else []}
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    if is_call:
        kind = "response.function_call_arguments"
        yield {"type": f"{kind}.delta", **at, "delta": item["arguments"]}
        yield {"type": f"{kind}.done", **at, "name": item["name"], "arguments": item["arguments"]}
    else:
        part = item["content"][0]
        at["content_index"] = 0
        kind = f"response.{part['type']}"
        extra = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
        empty = {**part, "text": "", **({"logprobs": []} if extra else {})}
        yield {"type": "response.content_part.added", **at, "part": empty}
        yield {"type": f"{kind}.delta", **at, "delta": part["text"], **extra}
        yield {"type": f"{kind}.done", **at, "text": part["text"], **extra}
        yield {"type": "response.content_part.done", **at, "part": part}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _usage(turn: ChatTurn) -> dict[str, Any]:
    """Counts. Tokens of reasoning are not counted apart: 0 stands because clients require a number."""
    generation = turn.generation
    return {
        "input_tokens": generation.prompt_tokens,
        "input_tokens_details": {"cached_tokens": generation.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": len(generation.token_ids),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": generation.prompt_tokens + len(generation.token_ids),
    }
