"""Where the wall time of a step goes.

Each instant is divided equally among the spans open at that instant and is idle when none is open, so the shares of a step add
up to 1 however spans nest or overlap. Ten episodes of which nine generate and one waits for a tool give 0.9 and 0.1.

One owner, one thread (an event loop is fine): no locks.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from psrl.telemetry.names import STEP_SECONDS, TimeUse, time_share


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """What one step took."""

    seconds: float
    shares: dict[TimeUse, float]
    """One for each use; they add up to 1."""

    def metrics(self) -> dict[str, float]:
        """`time/step/seconds` and `time/share/...`."""
        return {STEP_SECONDS: self.seconds, **{time_share(use): share for use, share in self.shares.items()}}


class TimeShares:
    """Accumulates time by use between two calls of `take`.

    Example:
        `with shares.span("training"): ...` for 3 s and nothing for 1 s, then `take()` -> 4 s, training 0.75, idle 0.25.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds that never go back."""
        self._clock = clock
        self._open: Counter[TimeUse] = Counter()
        self._seconds = dict.fromkeys(TimeUse, 0.0)
        self._mark = clock()

    @contextmanager
    def span(self, use: TimeUse | str) -> Iterator[None]:
        """Time inside goes to `use`, shared with the other open spans."""
        use = TimeUse(use)
        self._settle()
        self._open[use] += 1
        try:
            yield
        finally:
            self._settle()
            self._open[use] -= 1

    def divide(self, use: TimeUse | str, seconds: Mapping[TimeUse, float]) -> None:
        """Spread the time booked under `use` in proportion to `seconds`.

        For work in other processes: the controller only sees that it waited for episodes, and each episode reports how long it
        generated, used tools and was graded. With all of `seconds` zero nothing moves.
        """
        self._settle()
        total = sum(seconds.values())
        if total <= 0:
            return
        booked = self._seconds[TimeUse(use)]
        self._seconds[TimeUse(use)] = 0.0
        for part, value in seconds.items():
            self._seconds[part] += booked * value / total

    def take(self) -> StepTime:
        """Time since the last take; starts the next step. Spans that are open stay open."""
        self._settle()
        total = sum(self._seconds.values())
        shares = {use: value / total for use, value in self._seconds.items()} if total > 0 else dict.fromkeys(TimeUse, 0.0)
        if total <= 0:
            shares[TimeUse.IDLE] = 1.0
        self._seconds = dict.fromkeys(TimeUse, 0.0)
        return StepTime(seconds=total, shares=shares)

    def _settle(self) -> None:
        now = self._clock()
        elapsed, self._mark = now - self._mark, now
        num_open = self._open.total()
        if num_open == 0:
            self._seconds[TimeUse.IDLE] += elapsed
            return
        for use, count in self._open.items():
            self._seconds[use] += elapsed * count / num_open
