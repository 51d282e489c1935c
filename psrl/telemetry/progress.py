"""One line that says how far something long is, of which it is known how many there are."""

from __future__ import annotations

import sys
import time
from typing import TextIO

LINES_ELSEWHERE = 20
"""Where the line cannot be redrawn, about so many are printed."""


class ProgressLine:
    """Redrawn in place on a terminal, now and then a line elsewhere.

    Example:
        `played 12/40  95 s  5 resolved`
    """

    def __init__(self, what: str, total: int, *, stream: TextIO | None = None) -> None:
        """`what` is the first word of the line; `stream` is stdout unless given."""
        self._what = what
        self._total = total
        self._stream = stream or sys.stdout
        self._num_done = 0
        self._width = 0
        self._began = time.monotonic()

    def done(self, tail: str) -> None:
        """One more; `tail` says what became of them so far."""
        self._num_done += 1
        line = f"{self._what} {self._num_done}/{self._total}  {time.monotonic() - self._began:.0f} s  {tail}"
        is_last = self._num_done == self._total
        if self._stream.isatty():
            self._stream.write("\r" + line.ljust(self._width) + ("\n" if is_last else ""))
            self._width = len(line)
        elif is_last or self._num_done % max(1, self._total // LINES_ELSEWHERE) == 0:
            self._stream.write(line + "\n")
        self._stream.flush()
