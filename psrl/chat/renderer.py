"""Messages to token ids, append-only, through the tokenizer's own chat template.

Invariant: `extend(ids, messages)` begins with all of `ids`. What the policy sampled is never decoded and encoded again, so the
ids trained on are the ids sampled. The price of a turn is the price of its new messages: they are rendered after a tiny fixed
conversation (`families.Anchor`), never after the real one.

Where a template rewrites earlier turns, the prompt of a later turn differs from the template's own; `chat.probe` says where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from psrl.chat.families import (
    Family,
    ToolSupport,
    alternating,
    as_plain_messages,
    derive_family,
    markup_of,
    text_with_calls,
    with_one_text_per_call,
    with_system_as_user,
)
from psrl.chat.parsers import ToolFormat, tool_formats
from psrl.chat.template import ChatTemplate
from psrl.errors import ConfigError, TemplateError
from psrl.types import Message, ParsedTurn, Role, ToolSchema


class HistoryThinking(StrEnum):
    """What becomes of the reasoning of earlier turns."""

    KEEP = "keep"
    """It stays in the context, since ids are only ever appended."""
    STRIP = "strip"
    """Where the template would drop it, the caller opens a new branch: `begins_branch` says when."""


class HfRenderer:
    """`protocols.Renderer` around a transformers tokenizer."""

    def __init__(
        self,
        template: ChatTemplate,
        *,
        tool_format: ToolFormat,
        extra_stop_ids: Sequence[int] = (),
        history_thinking: HistoryThinking = HistoryThinking.KEEP,
    ) -> None:
        """`extra_stop_ids` come from the model's generation config; the template's own end of turn is added."""
        self.template = template
        self.family: Family = derive_family(template)
        self.history_thinking = history_thinking
        self._tool_format = tool_format
        own = [self.family.end_of_turn_id, template.eos_token_id, *extra_stop_ids, *self.family.other_stops]
        self._stop_ids = tuple(dict.fromkeys(token_id for token_id in own if token_id is not None))
        self._closing_ids = frozenset({*self._stop_ids, self.family.closer_id})
        self._num_closer_ids = len(template.encode(self.family.closer))
        self._guard, self._guard_of_tools = markup_of(template, self.family, self._stop_ids)
        self._opened: tuple[tuple[tuple[Message, ...], tuple[ToolSchema, ...]], list[int]] | None = None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end an assistant turn, the template's own first."""
        return self._stop_ids

    def open(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
        """Render the first prompt, the header of the assistant's turn included.

        The last one is kept: the members of a group ask for the same prompt one after the other.

        Raises:
            TemplateError: The template refuses the messages.
        """
        asked = (tuple(messages), tuple(tools))
        opened = self._opened
        if opened is None or opened[0] != asked:
            opened = self._opened = (asked, self.template.encode(self.prompt_text(messages, tools)))
        return list(opened[1])

    def prompt_text(self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, header: bool = True) -> str:
        """The text whose ids `open` gives, cut by `chat.markup`; without `header` it ends where the last message ends."""
        tools = [self._guard.schema(tool) for tool in tools]
        shaped = self._shaped(messages, tools, is_opening=True)
        return self.template.text(shaped, () if self.family.tool_support is ToolSupport.PLAIN_TEXT else tools, header=header)

    def following(self, last_id: int | None, messages: Sequence[Message]) -> list[int]:
        """Ids between a sampled turn that ends with `last_id` and the next sampled turn, which answers `messages`.

        First what the template puts between them: the separator, and before it the end of the turn where the turn was cut (any
        stop id counts as the end of the turn). Then the messages, then the header of the assistant's turn.

        Args:
            last_id: The turn's last id; None for a turn of no ids.
            messages: All that came since the turn, assistant messages of another writer's included.

        Raises:
            TemplateError: The template refuses the messages.

        Example:
            ChatML, `<|im_end|>`, a user message "hi" -> ids of "\\n<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n".
        """
        ids = self.template.encode(self._text_between(messages))
        return ids[self._num_closer_ids :] if last_id in self._closing_ids else ids

    def extend(self, ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        """`ids`, which end with a sampled turn, and what `following` puts after them."""
        return [*ids, *self.following(ids[-1] if ids else None, messages)]

    def parse(self, sampled_ids: Sequence[int], *, turn: int, tools: Sequence[ToolSchema] = ()) -> ParsedTurn:
        """Read content, reasoning and calls from a sampled turn; never raises for what the policy wrote.

        `tools` are those that the prompt offered: formats that write values without their type need them.
        """
        text = self.template.decode(sampled_ids)
        spoken = list(sampled_ids)
        while spoken and spoken[-1] in self._stop_ids:
            spoken.pop()
        reasoning, rest = self._tool_format.split_reasoning(self.template.decode(spoken), is_open=self.family.opens_reasoning)
        parsed = self._tool_format.parse(rest, turn=turn, tools=tools)
        return ParsedTurn(content=parsed.content, reasoning=reasoning, calls=parsed.calls, text=text)

    def turn_ids(self, message: Message) -> list[int]:
        """What the policy would have sampled to say an assistant's message: content, calls in the run's format, end of turn.

        The content is the policy's own text: markup in it is markup.
        """
        return self.template.encode(text_with_calls(message, self._tool_format) + self.family.end_of_turn)

    def decode(self, ids: Sequence[int]) -> str:
        """Text with special tokens, for people only."""
        return self.template.decode(ids)

    def begins_branch(self, history: Sequence[Message], following: Sequence[Message]) -> bool:
        """Whether `following` makes the template drop reasoning of `history`, and `strip` asks to drop it.

        Then the caller opens a new trajectory with `open(history + following)` instead of extending the old one.
        """
        return self.history_thinking is HistoryThinking.STRIP and self.drops_reasoning(history, following)

    def drops_reasoning(self, history: Sequence[Message], following: Sequence[Message]) -> bool:
        """Whether the template leaves out reasoning of `history` once `following` comes after it."""
        since_question = list(history)
        for position, message in enumerate(history):
            if message.role is Role.USER:
                since_question = list(history[position:])
        beside_calls = self.family.takes_one_text_per_call  # such a template treats what is said there as reasoning
        has_reasoning = any(
            message.role is Role.ASSISTANT and (message.reasoning or (beside_calls and message.tool_calls and message.content))
            for message in since_question
        )
        return has_reasoning and any(message.role in self.family.drops_reasoning_before for message in following)

    def _text_between(self, messages: Sequence[Message]) -> str:
        """End of turn, separator, `messages`, header: all that stands between two sampled turns."""
        family = self.family
        shaped = self._shaped(messages, (), is_opening=False)
        if family.after_call and shaped and shaped[0].role is Role.TOOL:
            after = family.after_call.text_after(self.template.text(family.after_call.answered_by(shaped), header=True))
            if after.startswith(family.after_call.tail):
                return family.closer + family.separator + after[len(family.after_call.tail) :]
        after = family.plain.text_after(self.template.text([*family.plain.messages, *shaped], header=True))
        if not after.startswith(family.closer):
            raise TemplateError(f"the chat template does not end a turn with {family.closer!r} when messages follow it")
        return after

    def _shaped(self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, is_opening: bool) -> Sequence[Message]:
        """The messages as this template takes them, their texts cut where they would become markup."""
        family = self.family
        guards = {Role.TOOL: self._guard_of_tools}
        shaped: Sequence[Message] = [guards.get(message.role, self._guard).message(message) for message in messages]
        if family.tool_support is ToolSupport.PLAIN_TEXT:
            shaped = as_plain_messages(shaped, tools, self._tool_format)
        if family.takes_one_text_per_call:
            shaped = with_one_text_per_call(shaped)
        if not (family.takes_system and family.takes_later_system):
            shaped = with_system_as_user(shaped, keeps_first=is_opening and family.takes_system)
        if family.must_alternate:
            shaped = alternating(shaped)
        return shaped


def load_renderer(
    model_path: str, *, tool_format: str, history_thinking: str = "keep", template_options: Mapping[str, Any] | None = None
) -> HfRenderer:
    """The renderer of a model folder with a tokenizer and a chat template.

    Args:
        model_path: A folder on this machine; nothing is fetched.
        tool_format: A name of `chat.parsers`, or a dotted path.
        history_thinking: `keep` or `strip`.
        template_options: Passed to the chat template by name, such as {"enable_thinking": False}.

    Raises:
        ConfigError: The folder has no tokenizer, or a name is unknown.
        TemplateError: The tokenizer has no chat template, or one that cannot be used.
    """
    from transformers import AutoTokenizer  # here, since it costs seconds and parsers and configuration need none of it

    format_class = tool_formats.resolve(tool_format)
    if not Path(model_path).is_dir():
        raise ConfigError(key="model.path", value=model_path, rule="is no folder", fix="give a folder that holds a model and its tokenizer")
    if history_thinking not in set(HistoryThinking):
        fix = f"use one of {', '.join(HistoryThinking)}"
        raise ConfigError(key="model.history_thinking", value=history_thinking, rule="is no known choice", fix=fix)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except (OSError, ValueError) as error:
        fix = "give a folder that holds tokenizer.json and tokenizer_config.json"
        raise ConfigError(key="model.path", value=model_path, rule=f"no tokenizer can be loaded ({error})", fix=fix) from error
    return HfRenderer(
        ChatTemplate(tokenizer, template_options),
        tool_format=format_class(),
        extra_stop_ids=_generation_stop_ids(model_path),
        history_thinking=HistoryThinking(history_thinking),
    )


def _generation_stop_ids(model_path: str) -> list[int]:
    """`eos_token_id` of generation_config.json, which may be one id or several; none without that file."""
    from transformers import GenerationConfig

    try:
        eos = GenerationConfig.from_pretrained(model_path, local_files_only=True).eos_token_id
    except OSError:
        return []
    if eos is None:
        return []
    return [eos] if isinstance(eos, int) else list(eos)
