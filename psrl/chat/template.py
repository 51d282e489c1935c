"""A tokenizer and its chat template, seen as two plain functions: messages to text, text to ids.

Not append-only: that is the renderer's. Nothing here caches anything but what transformers caches (the compiled template).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from psrl.errors import TemplateError
from psrl.types import Message, ToolSchema


class ChatTemplate:
    """Renders through the tokenizer's own template; the only place that knows transformers' calls."""

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None) -> None:
        """`options` are passed to the template by name, such as {"enable_thinking": False}.

        Raises:
            TemplateError: The tokenizer has no chat template.
        """
        if not tokenizer.chat_template:
            raise TemplateError(f"the tokenizer in {tokenizer.name_or_path!r} has no chat template; add chat_template.jinja to the folder")
        self._tokenizer = tokenizer
        self._options = dict(options or {})
        self._vocabulary: dict[str, int] = tokenizer.get_vocab()

    def text(self, messages: Sequence[Message | Mapping[str, Any]], tools: Sequence[ToolSchema] = (), *, header: bool) -> str:
        """What the template writes; `header` adds the beginning of the assistant's turn.

        Raises:
            TemplateError: The template refuses these messages; the message says why.
        """
        plain = [message.to_template() if isinstance(message, Message) else dict(message) for message in messages]
        schemas = [tool.to_template() for tool in tools] or None
        try:
            text = self._tokenizer.apply_chat_template(plain, tools=schemas, add_generation_prompt=header, tokenize=False, **self._options)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
            roles = ", ".join(str(message["role"]) for message in plain)
            raise TemplateError(f"the chat template refuses a conversation of roles [{roles}]: {error}") from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Ids of text that already holds all special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included, spaces as they are."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def token_id(self, token: str) -> int | None:
        """The id of a token that the vocabulary holds whole, else None."""
        token_id: int | None = self._vocabulary.get(token)
        return token_id

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that the tokenizer never makes from ordinary text."""
        return frozenset(self._tokenizer.added_tokens_decoder)

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end token."""
        token_id: int | None = self._tokenizer.eos_token_id
        return token_id
