"""A tokenizer and its chat template, seen as two plain functions: messages to text, text to ids.

Not append-only: that is the renderer's. Nothing here is cached but the compiled template. No clock: a template that prints today's
date prints `current_date`, so the same task has the same ids on every day of a run and after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import jinja2

from psrl.chat.jinja import compile_template
from psrl.chat.markup import pieces
from psrl.errors import TemplateError
from psrl.types import Message, Role, ToolCall, ToolSchema

DEFAULT_DATE = "2025-01-01"
"""What templates that print today's date print, unless the template option `current_date` says otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallShape:
    """How a template wants a message with calls; a wrong guess loses the calls or is an error."""

    is_content_none: bool
    """Content that is empty is None (DeepSeek)."""
    are_arguments_text: bool
    """The arguments are JSON text, not an object."""


CALL_SHAPES = tuple(
    CallShape(is_content_none=is_content_none, are_arguments_text=are_arguments_text)
    for is_content_none in (False, True)
    for are_arguments_text in (False, True)
)
SHAPE_QUESTION = Message(role=Role.USER, content="psrlQuestion")
SHAPE_CALL = Message(role=Role.ASSISTANT, tool_calls=(ToolCall(id="call-0-0", name="psrlTool", arguments={"text": "psrlValue"}),))


class ChatTemplate:
    """Renders through the tokenizer's own template; the only place that knows transformers' calls."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None) -> None:
        """`options` are passed to the template by name, such as {"enable_thinking": False}; see also `DEFAULT_DATE`.

        Raises:
            TemplateError: The tokenizer has no chat template, or `current_date` is no date.
        """
        if not tokenizer.chat_template:
            raise TemplateError(f"the tokenizer in {tokenizer.name_or_path!r} has no chat template; add chat_template.jinja to the folder")
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        self._current_date = str(self._options.pop("current_date", DEFAULT_DATE))
        try:
            today = date.fromisoformat(self._current_date)
        except ValueError as error:
            raise TemplateError(f"template option current_date is {self._current_date!r}; write it as {DEFAULT_DATE}") from error
        try:
            self._compiled = compile_template(tokenizer.get_chat_template(), today)
            self._compiled_for_tools = compile_template(tokenizer.get_chat_template(tools=[{}]), today)
        except (jinja2.TemplateError, ValueError) as error:
            raise TemplateError(f"the chat template in {tokenizer.name_or_path!r} cannot be used: {error}") from error
        self._prints_date = "strftime_now" in tokenizer.get_chat_template()
        self._options = {**tokenizer.special_tokens_map, **self._options}
        self._call_shape = next((shape for shape in CALL_SHAPES if self._writes_calls(shape)), CALL_SHAPES[0])
        self._vocabulary: dict[str, int] = tokenizer.get_vocab()

    def text(self, messages: Sequence[Message | Mapping[str, Any]], tools: Sequence[ToolSchema] = (), *, header: bool) -> str:
        """What the template writes; `header` adds the beginning of the assistant's turn.

        Raises:
            TemplateError: The template refuses these messages; the message says why.
        """
        plain = [_plain(message, self._call_shape) if isinstance(message, Message) else dict(message) for message in messages]
        schemas = [tool.to_template() for tool in tools] or None
        compiled = self._compiled_for_tools if schemas else self._compiled
        try:
            return compiled.render(messages=plain, tools=schemas, documents=None, add_generation_prompt=header, **self._options)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            roles = ", ".join(str(message["role"]) for message in plain)
            raise TemplateError(f"the chat template refuses a conversation of roles [{roles}]: {error}") from error

    def _writes_calls(self, shape: CallShape) -> bool:
        self._call_shape = shape
        try:
            return "psrlValue" in self.text([SHAPE_QUESTION, SHAPE_CALL], header=False)
        except TemplateError:
            return False

    def encode(self, text: str) -> list[int]:
        """Ids of rendered text, which already holds all special tokens; what `markup.Guard` has cut stays ordinary text."""
        ids: list[int] = []
        for piece in pieces(text):
            ids += self._tokenizer.backend_tokenizer.encode(piece, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included, spaces as they are."""
        text: str = self._tokenizer.backend_tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def token_id(self, token: str) -> int | None:
        """The id of a token that the vocabulary holds whole, else None."""
        token_id: int | None = self._vocabulary.get(token)
        return token_id

    @property
    def added_tokens(self) -> dict[int, str]:
        """Tokens that stand outside of the ordinary vocabulary: the special ones, and words such as `<think>` or Gemma's `<table>`."""
        return {token_id: token.content for token_id, token in self._tokenizer.added_tokens_decoder.items()}

    @property
    def special_tokens(self) -> frozenset[str]:
        """Those of `added_tokens` that the tokenizer itself calls special."""
        return frozenset(token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special)

    @property
    def bos_token(self) -> str | None:
        """The tokenizer's own token for the beginning of a text; whether a prompt has one is the template's choice."""
        token: str | None = self._tokenizer.bos_token
        return token

    @property
    def prints_date(self) -> bool:
        """Whether the template asks for today's date anywhere."""
        return self._prints_date

    @property
    def current_date(self) -> str:
        """What a template that asks for today's date is told."""
        return self._current_date

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end token."""
        token_id: int | None = self._tokenizer.eos_token_id
        return token_id


def _plain(message: Message, shape: CallShape) -> dict[str, Any]:
    """A message for templates; reasoning under each name that templates read it by."""
    plain = message.to_template()
    if message.tool_calls and shape.is_content_none and not message.content:
        plain["content"] = None
    if shape.are_arguments_text:
        for call in plain.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    if message.reasoning is not None:
        plain["reasoning"] = plain["thinking"] = message.reasoning
    return plain
