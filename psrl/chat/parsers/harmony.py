"""GPT-OSS's harmony format: a turn is a row of messages, each with a channel and perhaps a recipient.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>

The channel `analysis` is the reasoning, `final` and everything else the content, and a message with a recipient is a call, whatever
its channel. The recipient stands in the role or after the channel. The turn begins inside the first header, since the template has
written `<|start|>assistant`; its last message may lack its end, which is the token that ended the turn.

A message of text ends at the first ending token that another message or the end of the turn follows; a call ends after its JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psrl.chat.parsers.base import ParsedCalls, ToolFormat, tool_formats
from psrl.chat.parsers.json_calls import read_json, said_with, skip_whitespace
from psrl.chat.parsers.written_calls import BrokenCallEnds, UnreadableError, WrittenCall, numbered
from psrl.types import ToolSchema

SHAPE = "<|start|>assistant<|channel|>commentary to=functions.<function-name> <|constrain|>json<|message|><args-json-object><|call|>"
FUNCTIONS = "functions."
START = "<|start|>"
MESSAGE = "<|message|>"

_START = re.escape(START)
_END = r"<\|(?:end|call|return)\|>"
_HEADER_END = re.compile(rf"<\|message\|>|{_START}|{_END}")
_BODY_END = re.compile(rf"{_END}(?=\s*(?:{_START}|<\|channel\|>|\Z))|(?={_START}assistant)")
_JSON_END = re.compile(rf"\s*(?:{_END}|(?={_START})|\Z)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    start: int
    end: int
    channel: str | None
    body: str
    call: WrittenCall | None


@tool_formats.register("harmony")
class HarmonyFormat(ToolFormat):
    """Reads and writes harmony."""

    def split_reasoning(self, text: str, *, is_open: bool) -> tuple[str | None, str]:
        """The channel `analysis`, wherever it stands; `is_open` means nothing here, since the turn writes every channel itself."""
        thoughts: list[str] = []
        rest: list[str] = []
        for message in _messages(text):
            if message.channel == "analysis" and message.call is None:
                thoughts.append(message.body)
            else:
                rest.append(text[message.start : message.end])
        return ("\n".join(thoughts) if thoughts else None), "".join(rest)

    def parse(self, text: str, *, turn: int, tools: Sequence[ToolSchema] = ()) -> ParsedCalls:
        """Read every call; see `ToolFormat.parse`."""
        messages = list(_messages(text))
        calls = [message.call for message in messages if message.call is not None]
        said = [message.body for message in messages if message.call is None and message.channel != "analysis"]
        if calls or len(said) > 1:
            said = [body.strip("\n") for body in said]
        return ParsedCalls(content="\n".join(body for body in said if body), calls=numbered(text, calls, turn=turn))

    def system_text(self, tools: Sequence[ToolSchema]) -> str:
        """The tools and the shape of a call."""
        listed = "\n".join(json.dumps(tool.to_template(), ensure_ascii=False) for tool in tools)
        return f"# Tools\n\n## functions\n\n{listed}\n\nCalls to these tools must go to the commentary channel, written as:\n{SHAPE}"

    def call_text(self, name: str, arguments: Mapping[str, Any]) -> str:
        """A call as GPT-OSS writes it."""
        header = f"<|start|>assistant<|channel|>commentary to={FUNCTIONS}{name} <|constrain|>json"
        return f"{header}<|message|>{json.dumps(dict(arguments), ensure_ascii=False)}<|call|>"

    def response_text(self, content: str) -> str:
        """A tool's answer; the format has no words around it."""
        return content


def _messages(text: str) -> Iterator[_Message]:
    """Every message in order; together they are the whole text."""
    ends = BrokenCallEnds(text, opens=_START, closes=_END)
    position = 0
    while position < len(text):
        message = _read(text, position, ends)
        yield message
        position = message.end


def _read(text: str, start: int, ends: BrokenCallEnds) -> _Message:
    """The message that begins at `start`; text without a header is a message without a channel."""
    begin = skip_whitespace(text, start)
    is_opened = text.startswith(START, begin)
    header_start = begin + len(START) if is_opened else start
    header_end = _HEADER_END.search(text, header_start)
    stop = header_end.start() if header_end else len(text)
    header = text[header_start:stop]
    has_body = header_end is not None and header_end[0] == MESSAGE
    channel = _CHANNEL.search(header)
    is_header = has_body or is_opened or channel is not None
    recipient = _RECIPIENT.search(header) if is_header else None
    if header_end is None or not has_body:
        end = header_end.end() if header_end and header_end[0] != START else stop
        said = UnreadableError("unclosed", f"The call has no {MESSAGE}. Write it as:\n{SHAPE}")
        call = WrittenCall(start=begin, end=stop, said=said) if recipient else None
        body = "" if is_header or header.isspace() else header
        return _Message(start=start, end=end, channel=channel and channel[1], body=body, call=call)
    if recipient:
        call = _call(text, begin, header_end.end(), recipient[1], ends)
        return _Message(start=start, end=call.end, channel=channel and channel[1], body="", call=call)
    body_end = _BODY_END.search(text, header_end.end())
    stop, end = body_end.span() if body_end else (len(text), len(text))
    return _Message(start=start, end=end, channel=channel and channel[1], body=text[header_end.end() : stop], call=None)


def _call(text: str, start: int, begin: int, recipient: str, ends: BrokenCallEnds) -> WrittenCall:
    """The call to `recipient` whose arguments begin at `begin`."""
    name = recipient.removeprefix(FUNCTIONS)
    begin = skip_whitespace(text, begin)
    try:
        if _JSON_END.match(text, begin):
            raise UnreadableError("empty", f"The call has no arguments. Write it as:\n{SHAPE}")
        arguments, json_end = read_json(text, begin)
        closing = _JSON_END.match(text, json_end)
        if not closing:
            raise UnreadableError("invalid_json", "<|call|> does not follow the call's JSON.", position=json_end)
    except UnreadableError as why:
        end, _ = ends.end(begin, begin if why.position is None else why.position)
        return WrittenCall(start=start, end=end, said=why)
    if not name:
        return WrittenCall(
            start=start, end=closing.end(), said=UnreadableError("missing_name", f"The call has no name. Write it as:\n{SHAPE}")
        )
    return WrittenCall(start=start, end=closing.end(), said=said_with(name, arguments, shape=SHAPE))
