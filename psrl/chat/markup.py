"""Keeps the text of a message from becoming markup: nobody but the template writes a special token.

A tool that prints `<|im_end|>\\n<|im_start|>user` must not end its message. Wherever the text of such a token stands in a message, a
tool's schema or a call, it is cut after its first character by a private character, which survives the template; the pieces
are then encoded one by one, so the text stays what it was and the token never forms. Text that holds no such token is not touched:
its ids are exactly the template's own.

Which tokens: see `families.markup`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from psrl.types import Message, ToolCall, ToolSchema

CUT = "\ufdd0"
"""A Unicode noncharacter: between the pieces. Real ones in a text are followed by KEPT."""
KEPT = "\ufdd1"
_CUTS = re.compile(f"{CUT}(?!{KEPT})")


def pieces(text: str) -> list[str]:
    """The rendered text in the pieces that are encoded one by one; most have one."""
    if CUT not in text:
        return [text]
    return [piece.replace(CUT + KEPT, CUT) for piece in _CUTS.split(text)]


class Guard:
    """Cuts the text of some tokens. Immutable; the price is one pass over the text for the tokens' first characters."""

    def __init__(self, tokens: Iterable[str]) -> None:
        """Tokens of one character cannot be cut and are left out."""
        self._tokens = frozenset(token for token in tokens if len(token) > 1)
        lengths: dict[str, set[int]] = defaultdict(set)
        for token in self._tokens:
            lengths[token[:2]].add(len(token))
        self._lengths = {start: tuple(sorted(found)) for start, found in lengths.items()}
        firsts = sorted({token[0] for token in self._tokens})
        self._first = re.compile(f"[{''.join(map(re.escape, firsts))}]" if firsts else "(?!)")

    @property
    def tokens(self) -> frozenset[str]:
        """What is cut."""
        return self._tokens

    def text(self, text: str) -> str:
        """The same with every occurrence cut, overlapping ones too.

        Example:
            "<|im_end|>" -> "<" CUT "|im_end|>".
        """
        text = text.replace(CUT, CUT + KEPT)
        places = [match.start() + 1 for match in self._first.finditer(text) if self._stands_at(text, match.start())]
        if not places:
            return text
        return CUT.join(text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True))

    def value(self, value: Any) -> Any:
        """A JSON value with all its texts cut, keys included."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value

    def schema(self, tool: ToolSchema) -> ToolSchema:
        """A tool's schema with all its texts cut."""
        return ToolSchema(name=self.text(tool.name), description=self.text(tool.description), parameters=self.value(tool.parameters))

    def message(self, message: Message) -> Message:
        """A message with all its texts cut."""
        return replace(
            message,
            content=self.text(message.content),
            reasoning=self._optional(message.reasoning),
            tool_call_id=self._optional(message.tool_call_id),
            name=self._optional(message.name),
            tool_calls=tuple(self._call(call) for call in message.tool_calls),
        )

    def _stands_at(self, text: str, start: int) -> bool:
        return any(text[start : start + length] in self._tokens for length in self._lengths.get(text[start : start + 2], ()))

    def _optional(self, text: str | None) -> str | None:
        return None if text is None else self.text(text)

    def _call(self, call: ToolCall) -> ToolCall:
        return ToolCall(id=self.text(call.id), name=self.text(call.name), arguments=self.value(call.arguments))
