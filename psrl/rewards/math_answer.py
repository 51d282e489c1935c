"""Answers in boxes: finding them, normalising them, and deciding equality where that is plain. Pure; nothing here can hang.

`same_plain_answer` decides what needs no mathematics (equal text, two numbers). All else is for math-verify, which may run for ever
on some inputs and therefore runs in a child (`grading_worker.py`).
"""

from __future__ import annotations

import re
from fractions import Fraction

_MARK = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
"""A box, an escaped character (two characters, which count for nothing), or a brace."""
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)")
_MAX_DIGITS = 4000
"""Longer numbers are compared as text only: Python refuses to convert them."""
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?")
_SIMPLE_FRACTION = re.compile(r"([+-]?)\\frac\{(\d+)\}\{(\d+)\}")
_BARE_FRACTION = re.compile(r"\\frac\s*(\d)\s*(\d)(?!\d)")
_HALF_BARE_FRACTION = re.compile(r"\\frac\s*(\d)\s*\{")
_REMOVED = ("\\left", "\\right", "\\!", "\\,", "\\;", "\\:", "\\ ", "\\%", "%", "^\\circ", "^{\\circ}", "\\$", "$")
_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\{([^{}]*)\}")


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` whose braces are balanced, whatever follows it; None where there is none.

    Example:
        last_boxed(r"\boxed{1}, no: \boxed{\frac{1}{2}}. Done \boxed{") is r"\frac{1}{2}".
    """
    answer: tuple[int, int] | None = None
    open_braces: list[tuple[int, bool]] = []  # (where its content begins, whether it is a box)
    position = 0
    while (found := _MARK.search(text, position)) is not None:
        position = found.end()
        mark = found[0]
        if mark == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box and (answer is None or start > answer[0]):
                answer = (start, found.start())
        elif mark[-1] == "{" and len(mark) != 2:
            open_braces.append((position, mark != "{"))
    return text[slice(*answer)] if answer is not None else None


def normalise(answer: str) -> str:
    r"""The same answer without what only typesets it.

    Example:
        normalise(r" $\dfrac12$. ") is r"\frac{1}{2}"; normalise("1,234") is "1234".
    """
    text = answer.strip().replace("\u2212", "-").replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    for part in _REMOVED:
        text = text.replace(part, "")
    text = _TEXT.sub(r"\1", text).strip().rstrip(".").strip()
    text = _BARE_FRACTION.sub(r"\\frac{\1}{\2}", text)
    text = _HALF_BARE_FRACTION.sub(r"\\frac{\1}{", text)
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    return re.sub(r"\s+", " ", text)


def same_plain_answer(answer: str, truth: str) -> bool | None:
    r"""Whether two answers are equal, where text or plain numbers decide it; None where it needs mathematics.

    Example:
        ("42.0", " 42") -> True; ("41", "42") -> False; (r"\sqrt{4}", "2") -> None.
    """
    left, right = normalise(answer), normalise(truth)
    if left == right:
        return bool(left)
    if not left:
        return False
    values = _plain_value(left), _plain_value(right)
    if values[0] is None or values[1] is None:
        return None
    return values[0] == values[1]


def _plain_value(text: str) -> Fraction | None:
    if len(text) > _MAX_DIGITS:
        return None
    if _NUMBER.fullmatch(text):
        return Fraction(text)
    match = _SIMPLE_FRACTION.fullmatch(text)
    if match and int(match[3]):
        return Fraction(int(match[1] + match[2]), int(match[3]))
    return None
