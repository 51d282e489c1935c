"""Splits reasoning that stands in tags from what a turn says."""

from __future__ import annotations

OPEN = "<think>"
CLOSE = "</think>"


def split_reasoning(text: str, *, is_open: bool, tags: tuple[str, str] = (OPEN, CLOSE)) -> tuple[str | None, str]:
    """(reasoning, rest). Reasoning stands at the start of a turn only; a later `<think>` is ordinary text.

    Reasoning that is never closed takes the whole turn, so calls that the policy only thought about are not run.

    Args:
        text: The decoded turn.
        is_open: The assistant's header already ends with `<think>`, so the turn begins inside the reasoning.
        tags: What opens and what closes it.

    Example:
        "<think>\\nadd\\n</think>\\n\\n5" -> ("add", "5"); "5" -> (None, "5").
    """
    opening, closing = tags
    body = text.lstrip()
    if body.startswith(opening):
        body = body[len(opening) :]
    elif not is_open:
        return None, text
    reasoning, closed, rest = body.partition(closing)
    return reasoning.strip("\n"), rest.lstrip("\n") if closed else ""
