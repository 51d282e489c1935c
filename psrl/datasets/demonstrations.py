"""Demonstrations for supervised fine-tuning: conversations from files or generators, and their exact tokens.

Tokens are laid out by the renderer that the agent loops use, so a demonstration is the token record that an episode with the same
turns would have. Learned is what the policy would have sampled: the assistant's text and its end-of-turn token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from psrl.chat import HfRenderer
from psrl.datasets.rows import message_of, named, read_raw_rows
from psrl.errors import ConfigError, MessageError, RowError
from psrl.types import Message, Role, ToolCall, ToolSchema


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """A whole conversation."""

    messages: tuple[Message, ...]
    """Calls of the assistant are `tool_calls`, or text, so that broken ones can be shown too."""
    tools: tuple[ToolSchema, ...] = ()
    """What the prompt offers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DemonstrationTokens:
    """A demonstration as the model reads it."""

    ids: list[int]  # [T]
    loss_mask: list[int]  # [T]
    """1 where the assistant wrote the token."""


def tokens_of(demonstration: Demonstration, renderer: HfRenderer) -> DemonstrationTokens:
    """Lay out one demonstration; what follows the last assistant turn is left out.

    Example:
        `user 2 + 2? / assistant \\boxed{4}` has mask 0 up to and including the header `<|im_start|>assistant\\n`, and 1 for the
        answer and `<|im_end|>`.
    """
    ids: list[int] = []
    loss_mask: list[int] = []
    waiting: list[Message] = []
    for message in demonstration.messages:
        if message.role is not Role.ASSISTANT:
            waiting.append(message)
            continue
        before = renderer.extend(ids, waiting) if ids else renderer.open(waiting, demonstration.tools)
        turn = renderer.turn_ids(message)
        loss_mask += [0] * (len(before) - len(ids)) + [1] * len(turn)
        ids, waiting = before + turn, []
    return DemonstrationTokens(ids=ids, loss_mask=loss_mask)


def tokens_of_all(demonstrations: Iterable[Demonstration], renderer: HfRenderer) -> Iterator[DemonstrationTokens]:
    """One after the other, so that only what is being learned is held."""
    for demonstration in demonstrations:
        yield tokens_of(demonstration, renderer)


def load_demonstrations(files: Sequence[str]) -> list[Demonstration]:
    """Rows with `messages` and optionally `tools` (OpenAI's function schemas, also as one JSON text).

    An assistant's message may have `tool_calls`, as OpenAI's API gives them; they are written in the run's tool-call format.

    Raises:
        ConfigError: A file cannot be read, a row cannot be used (rows are named), or there is none.
    """
    found: list[Demonstration] = []
    bad: list[RowError] = []
    for file in files:
        for row, raw in enumerate(read_raw_rows(file, key="sft.train_files")):
            try:
                found.append(_demonstration(raw))
            except (MessageError, KeyError, TypeError, ValueError) as error:
                detail = f"missing {error}" if isinstance(error, KeyError) else str(error)
                bad.append(RowError(source=file, row=row, reason="bad_demonstration", detail=detail))
    if bad or not found:
        rule = f"{len(bad)} rows cannot be used: {named(bad)}" if bad else "hold no row"
        raise ConfigError(key="sft.train_files", value=list(files), rule=rule, fix="correct these rows")
    return found


def _demonstration(raw: Any) -> Demonstration:
    if not isinstance(raw, Mapping):
        raise MessageError(f"a row is an object with messages, this is {type(raw).__name__}: {raw!r:.80}")
    messages = tuple(_message(entry) for entry in raw["messages"])
    turns = [position for position, message in enumerate(messages) if message.role is Role.ASSISTANT]
    if not turns or turns[0] == 0 or any(after - before == 1 for before, after in pairwise(turns)):
        raise MessageError("a demonstration needs an assistant turn, and other messages before each of them")
    offered = raw.get("tools") or ()
    if isinstance(offered, str):  # as Parquet files hold what has no fixed columns
        offered = json.loads(offered)
    tools = tuple(
        ToolSchema(name=tool["function"]["name"], description=tool["function"]["description"], parameters=tool["function"]["parameters"])
        for tool in offered
    )
    return Demonstration(messages=messages, tools=tools)


def _message(entry: Any) -> Message:
    """One message, its calls included."""
    if not isinstance(entry, dict) or not entry.get("tool_calls"):
        return message_of(entry)
    said = message_of({**entry, "content": entry.get("content") or "", "tool_calls": None})
    if said.role is not Role.ASSISTANT:
        raise MessageError(f"only the assistant calls tools, this message is the {said.role.value}'s")
    return replace(said, tool_calls=tuple(_call(call, number) for number, call in enumerate(entry["tool_calls"])))


def _call(call: Any, number: int) -> ToolCall:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):  # OpenAI's API gives JSON text
        arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        raise MessageError(f"arguments of a call are an object, these are {arguments!r:.80}")
    # Parquet gives every call the columns of all calls.
    given = {name: value for name, value in arguments.items() if value is not None}
    return ToolCall(id=call.get("id") or f"call-{number}", name=function["name"], arguments=given)
