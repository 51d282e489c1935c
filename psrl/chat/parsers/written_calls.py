"""Calls as they stand in a turn's text: where each begins and ends, and what is said of those that cannot be read.

What every format shares. A format finds its calls (`WrittenCall`, in order, none inside another); here they get their ids, and
what stands between them becomes the content.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from psrl.chat.parsers.base import ParsedCalls, call_id
from psrl.types import ToolCall, ToolCallError

LOOK_BACK = 8
"""How often at most a character is read again because an earlier broken call had read over it: keeps hostile texts linear."""


class UnreadableError(Exception):
    """Why a call cannot be used: a cause for metrics, and words for the model."""

    def __init__(self, cause: str, message: str, *, position: int | None = None) -> None:
        """`position` is where the text stopped being readable, where that is known."""
        super().__init__(message)
        self.cause = cause
        self.message = message
        self.position = position


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenCall:
    """A call, or what was meant as one."""

    start: int
    """Of its first mark."""
    end: int
    """After its last."""
    said: tuple[str, dict[str, Any]] | UnreadableError
    """(name, arguments), or why there are none."""


def numbered(text: str, found: Iterable[WrittenCall], *, turn: int) -> tuple[ToolCall | ToolCallError, ...]:
    """The calls with their ids."""
    calls: list[ToolCall | ToolCallError] = []
    for position, call in enumerate(found):
        identity = call_id(turn, position)
        if isinstance(call.said, UnreadableError):
            written = text[call.start : call.end]
            calls.append(ToolCallError(id=identity, cause=call.said.cause, message=call.said.message, written=written))
        else:
            calls.append(ToolCall(id=identity, name=call.said[0], arguments=call.said[1]))
    return tuple(calls)


def parsed(text: str, found: Sequence[WrittenCall], *, turn: int) -> ParsedCalls:
    """The calls, and what stands outside of them; a text without calls is kept to the last space."""
    if not found:
        return ParsedCalls(content=text, calls=())
    starts = [*(call.start for call in found), len(text)]
    ends = [0, *(call.end for call in found)]
    pieces = (text[end:start].strip("\n") for end, start in zip(ends, starts, strict=True))
    return ParsedCalls(content="\n".join(piece for piece in pieces if piece), calls=numbered(text, found, turn=turn))


class BrokenCallEnds:
    """Where calls end whose JSON cannot be read, in one text.

    Such a call ends at the first tag outside of JSON strings: after it if it closes, before it if it opens. A closing tag inside a
    string counts too if the next call (or the end of the text) follows it: a quote that was never closed hid both.
    """

    def __init__(self, text: str, *, opens: str, closes: str | None) -> None:
        """`opens` and `closes` are regular expressions; `closes` is None where nothing but the next call ends one."""
        self._text = text
        self._opens = re.compile(opens)
        tags = opens if closes is None else f"{opens}|{closes}"
        self._pieces = re.compile(rf'"(?:[^"\\]|\\.)*+"?|{tags}', re.DOTALL)
        self._braces = re.compile(rf'"(?:[^"\\]|\\.)*+"?|{opens}|[{{}},\]]', re.DOTALL)
        self._closes = None if closes is None else re.compile(closes)
        self._hidden = None if closes is None else re.compile(rf"(?:{closes})(?=\s*(?:\Z|{opens}))")
        self._allowance = LOOK_BACK * len(text)

    def end(self, begin: int, broke: int) -> tuple[int, bool]:
        """(where the call ends, whether a closing tag ends it).

        Args:
            begin: Where its JSON begins.
            broke: Where its JSON stopped being readable.
        """
        first_close = None
        for piece in self._pieces.finditer(self._text, begin):
            if piece[0][0] != '"':
                closed = not self._opens.match(piece[0])
                return (piece.end() if closed else piece.start()), closed
            if self._closes is None or self._hidden is None or self._allowance <= 0:
                continue
            hidden = self._hidden.search(self._text, piece.start(), piece.end())
            if hidden:
                return self._look_back(hidden.end(), max(broke, piece.end())), True
            first_close = first_close or self._closes.search(self._text, piece.start(), piece.end())
        if first_close:
            return self._look_back(first_close.end(), len(self._text)), True
        return len(self._text), False

    def balanced(self, begin: int) -> int | None:
        """Where the element of a list that begins at `begin` ends, by its braces alone; None where they never balance.

        Example:
            `{"a": }, {"b": 1}]` -> 7, before the comma.
        """
        depth = 0
        for piece in self._braces.finditer(self._text, begin):
            mark = piece[0]
            if mark == "{":
                depth += 1
            elif mark == "}":
                depth -= 1
                if depth <= 0:
                    return piece.end()
            elif mark in (",", "]"):
                if depth == 0:
                    return piece.start()
            elif mark[0] != '"':
                return None
        return None

    def _look_back(self, end: int, read: int) -> int:
        self._allowance -= read - end
        return end
