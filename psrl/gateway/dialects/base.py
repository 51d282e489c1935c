"""What a dialect of a session's API turns requests into, and what it writes answers from.

A dialect knows one API's JSON and nothing of tokens, trees or engines. All dialects of a session share its tree, so an agent may mix them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from psrl.errors import SessionRequestError
from psrl.gateway.dialects.fields import ReadBefore
from psrl.types import Generation, Message, ToolCall, ToolSchema


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedSampling:
    """What the agent asks of a turn's sampling."""

    max_tokens: int | None = None
    """Honoured where it is below the session's own limits."""
    stop: tuple[str, ...] = ()
    """Texts that end the turn; the turn's ids end with the token that completes one."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """By OpenAI's name (`temperature`, `top_p`, `top_k`, `seed`, `presence_penalty`, ...), only what the agent sent and the
    API's neutral value is not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """One turn that an agent asks for, whatever API it speaks."""

    messages: tuple[Message, ...]
    """The whole conversation; the last one is not the assistant's."""
    tools: tuple[ToolSchema, ...] = ()
    """Empty where the agent forbids calls (`tool_choice: none`)."""
    sampling: AskedSampling = AskedSampling()
    model: str = ""
    """As the agent wrote it; given back, never looked at."""
    wants_stream: bool = False
    wants_usage: bool = False
    """Of a stream: whether its last chunk carries the token counts."""
    wants_logprobs: bool = False
    wants_token_ids: bool = False
    """psrl's own extension `return_token_ids`, for loops of psrl's own: the answer's choice has `token_ids`, `token_logprobs` and
    `policy_versions` (`session_client.bodies.generation_of` reads them)."""


class TurnEnd(StrEnum):
    """Why a turn ended, before a dialect gives it its own word."""

    STOP = "stop"
    TOOL_CALLS = "tool_calls"
    LENGTH = "length"
    """Cut by `max_tokens` or the session's limits; calls of a cut turn are not given out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTurn:
    """A captured turn, ready to be written as an answer."""

    id: str
    """Unique in the gateway; letters, digits and `-` only."""
    created: int
    """Seconds since 1970."""
    answer: Message
    """What the agent is given: content, reasoning and the calls that could be read. A call that could not be read stands in the
    content as the policy wrote it, so it is never lost."""
    end: TurnEnd
    stop_text: str | None
    """Which of the agent's stop texts ended the turn."""
    generation: Generation
    """Exactly what was captured."""
    token_texts: tuple[str, ...] = ()
    """Text of each sampled id, only where logprobs are wanted."""

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Calls that the agent is asked to run."""
        return self.answer.tool_calls


History = Callable[[str], Sequence[Message]]
"""The conversation through the turn of an id, its answer included; SessionRequestError 404 where the session has no such turn."""


class Dialect(Protocol):
    """One API: where it listens, how a request is read and an answer written. Stateless."""

    path: str
    """Below the session's address, such as `/v1/chat/completions`."""

    def read_request(self, body: Any, *, history: History, read_before: ReadBefore) -> ChatRequest:
        """Check and read a request's JSON.

        Args:
            body: As parsed.
            history: Of the session.
            read_before: Of the session and this dialect; a new one where there was no request yet.

        Raises:
            SessionRequestError: 400 with the parameter's name where a value is wrong or not supported.
        """

    def write_answer(self, turn: ChatTurn, request: ChatRequest) -> dict[str, Any]:
        """The JSON of a turn that is not streamed."""

    def write_stream(self, turn: ChatTurn, request: ChatRequest) -> Iterator[bytes]:
        """The same turn as server-sent events, whole lines with their blank line; the last one ends the stream."""

    def write_error(self, error: SessionRequestError) -> dict[str, Any]:
        """The JSON of an error as this API's clients read it."""

    def write_stream_error(self, error: SessionRequestError) -> bytes:
        """The event of an error that came up when the stream had begun."""

    @property
    def keep_alive(self) -> bytes:
        """An event that clients skip, sent while a turn is sampled; it also finds out whether the client is still there."""


def server_sent_event(data: Any, *, name: str | None = None) -> bytes:
    """One event of a stream. ASCII only: some clients take U+2028 and its like for ends of lines."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()
