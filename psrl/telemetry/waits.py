"""Seconds in which a step stands in a queue that its policy cannot make shorter.

Who waits for a place that many share says so (`waiting`); who plays the episode asks (`counting_waits`), also where the step never came
back. Without it a step that found every sandbox taken until its time was over would look like one that was too slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class Waits:
    """Time in which at least one wait was open."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = 0.0
        self._num_open = 0
        self._since = 0.0

    @property
    def seconds(self) -> float:
        """So far; waits that overlap count once.

        Example:
            Waits from 1 to 3 and from 2 to 4: 3 seconds.
        """
        return self._seconds + (self._clock() - self._since if self._num_open else 0.0)

    @contextmanager
    def open(self) -> Iterator[None]:
        """One wait, while the body runs."""
        if self._num_open == 0:
            self._since = self._clock()
        self._num_open += 1
        try:
            yield
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._seconds += self._clock() - self._since


_counted: ContextVar[Waits | None] = ContextVar("waits", default=None)


@contextmanager
def counting_waits() -> Iterator[Waits]:
    """Counts the waits of what the body starts, its tasks included."""
    waits = Waits()
    token = _counted.set(waits)
    try:
        yield waits
    finally:
        _counted.reset(token)


@contextmanager
def waiting() -> Iterator[None]:
    """The body waits for a place; nothing is counted where nobody asks."""
    waits = _counted.get()
    if waits is None:
        yield
        return
    with waits.open():
        yield
