"""Which tokens are a template's markup, so that the text of a message must not become one of them.

In any message, tool schema or call: special tokens, stop tokens, and tokens around turns (DeepSeek's `<｜User｜>` is not called special).
In a tool's answer: these, and every token that the template writes around reasoning, calls and answers, such as Qwen3's
`<tool_response>` and `<think>`.

A prompt may say "reason inside <think></think>" and an agent's own text may hold a call: there such words are the tokens that
the policy writes itself, as in every other reader of the template. What a tool prints comes from anywhere and may not.
"""

from __future__ import annotations

from psrl.chat.families.base import ANSWER, CALL, PROBE_TOOL, QUESTION, THOUGHT, Family
from psrl.chat.markup import Guard
from psrl.chat.template import ChatTemplate
from psrl.errors import TemplateError
from psrl.types import Message, Role


def markup_of(template: ChatTemplate, family: Family, stop_ids: tuple[int, ...]) -> tuple[Guard, Guard]:
    """(what nobody may write, what a tool's answer may not write)."""
    added = template.added_tokens
    turns = [QUESTION, Message(role=Role.ASSISTANT, content=ANSWER), QUESTION]
    around_turns = _written(template, template.text(turns, header=False))
    structure = template.special_tokens | around_turns | {added[token_id] for token_id in stop_ids if token_id in added}
    inside = {token for text in _rich_texts(template, family) for token in _written(template, text)}
    return Guard(structure), Guard(structure | inside)


def _written(template: ChatTemplate, text: str) -> frozenset[str]:
    """Added tokens of a rendering; white space that happens to be one (Gemma's line breaks) is no markup."""
    added = template.added_tokens
    tokens = (added[token_id] for token_id in template.encode(text) if token_id in added)
    return frozenset(token for token in tokens if token.strip())


def _rich_texts(template: ChatTemplate, family: Family) -> list[str]:
    """Renderings with tools, a call, reasoning and an answer, as far as the template knows of them."""
    tool = Message(role=Role.TOOL, content=ANSWER, name=PROBE_TOOL.name, tool_call_id="call-0-0")
    thoughtful = Message(role=Role.ASSISTANT, content=ANSWER, reasoning=THOUGHT)
    rendered = [family.header]
    for messages in ([QUESTION, CALL, tool], [QUESTION, CALL, tool, thoughtful], [QUESTION, thoughtful]):
        for tools in ((), (PROBE_TOOL,)):
            try:
                rendered.append(template.text(messages, tools, header=False))
            except TemplateError:
                continue
    return rendered
