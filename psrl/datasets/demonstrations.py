"""Demonstrations for supervised fine-tuning: conversations from files or generators, and their exact tokens.

Tokens are laid out by the renderer that the agent loops use, so a demonstration is the token record that an episode with the same
turns would have. Learned is what the policy would have sampled: the assistant's text and its end-of-turn token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from psrl.chat import HfRenderer
from psrl.datasets.rows import message_of, named, read_raw_rows
from psrl.errors import ConfigError, MessageError, RowError
from psrl.types import Message, Role, ToolSchema


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """A whole conversation."""

    messages: tuple[Message, ...]
    """Assistant messages hold their calls as text, so that broken calls can be shown too."""
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
        turn = renderer.template.encode(message.content + renderer.family.end_of_turn)
        loss_mask += [0] * (len(before) - len(ids)) + [1] * len(turn)
        ids, waiting = before + turn, []
    return DemonstrationTokens(ids=ids, loss_mask=loss_mask)


def tokens_of_all(demonstrations: Iterable[Demonstration], renderer: HfRenderer) -> Iterator[DemonstrationTokens]:
    """One after the other, so that only what is being learned is held."""
    for demonstration in demonstrations:
        yield tokens_of(demonstration, renderer)


def load_demonstrations(files: Sequence[str]) -> list[Demonstration]:
    """Rows with `messages` and optionally `tools` (OpenAI's function schemas).

    Raises:
        ConfigError: A file cannot be read, a row cannot be used (rows are named), or there is none.
    """
    found: list[Demonstration] = []
    bad: list[RowError] = []
    for file in files:
        for row, raw in enumerate(read_raw_rows(file, key="sft.train_files")):
            try:
                found.append(_demonstration(raw))
            except (MessageError, KeyError, TypeError) as error:
                detail = f"missing {error}" if isinstance(error, KeyError) else str(error)
                bad.append(RowError(source=file, row=row, reason="bad_demonstration", detail=detail))
    if bad or not found:
        rule = f"{len(bad)} rows cannot be used: {named(bad)}" if bad else "hold no row"
        raise ConfigError(key="sft.train_files", value=list(files), rule=rule, fix="correct these rows")
    return found


def _demonstration(raw: Any) -> Demonstration:
    if not isinstance(raw, Mapping):
        raise MessageError(f"a row is an object with messages, this is {type(raw).__name__}: {raw!r:.80}")
    messages = tuple(message_of(entry) for entry in raw["messages"])
    turns = [position for position, message in enumerate(messages) if message.role is Role.ASSISTANT]
    if not turns or turns[0] == 0 or any(after - before == 1 for before, after in pairwise(turns)):
        raise MessageError("a demonstration needs an assistant turn, and other messages before each of them")
    tools = tuple(
        ToolSchema(name=tool["function"]["name"], description=tool["function"]["description"], parameters=tool["function"]["parameters"])
        for tool in raw.get("tools") or ()
    )
    return Demonstration(messages=messages, tools=tools)
