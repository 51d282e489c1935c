"""One line that says how far something long is, of which it is known how many there are."""

from __future__ import annotations

import shutil
import sys
import time
from typing import TextIO

LINES_ELSEWHERE = 20
"""Where the line cannot be redrawn, about so many are printed."""
QUIET_S = 60.0
"""There, `show` says something after so long without a line."""


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
        self._began = self._said = time.monotonic()

    def done(self, tail: str) -> None:
        """One more; `tail` says what became of them so far."""
        self._num_done += 1
        is_last = self._num_done == self._total
        if self._stream.isatty() or is_last or self._num_done % max(1, self._total // LINES_ELSEWHERE) == 0:
            self._write(tail, is_last=is_last)

    def show(self, tail: str) -> None:
        """Nothing has ended since, but something goes on: `tail` says what."""
        if self._num_done < self._total and (self._stream.isatty() or time.monotonic() - self._said >= QUIET_S):
            self._write(tail, is_last=False)

    def _write(self, tail: str, *, is_last: bool) -> None:
        line = f"{self._what} {self._num_done}/{self._total}  {time.monotonic() - self._began:.0f} s  {tail}"
        if self._stream.isatty():
            line = line[: shutil.get_terminal_size().columns - 1]
            self._stream.write("\r" + line.ljust(self._width) + ("\n" if is_last else ""))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()
        self._said = time.monotonic()
