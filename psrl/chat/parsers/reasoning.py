"""Splits `<think>` reasoning from what a turn says."""

from __future__ import annotations

OPEN = "<think>"
CLOSE = "</think>"


def split_reasoning(text: str, *, is_open: bool) -> tuple[str | None, str]:
    """(reasoning, rest). Reasoning stands at the start of a turn only; a later `<think>` is ordinary text.

    Reasoning that is never closed takes the whole turn, so calls that the policy only thought about are not run.

    Args:
        text: The decoded turn.
        is_open: The assistant's header already ends with `<think>`, so the turn begins inside the reasoning.

    Example:
        "<think>\\nadd\\n</think>\\n\\n5" -> ("add", "5"); "5" -> (None, "5").
    """
    body = text.lstrip()
    if body.startswith(OPEN):
        body = body[len(OPEN) :]
    elif not is_open:
        return None, text
    reasoning, closed, rest = body.partition(CLOSE)
    return reasoning.strip("\n"), rest.lstrip("\n") if closed else ""
