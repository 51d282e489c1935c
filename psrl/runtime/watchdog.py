"""Says what a run waits for, and who holds it, when nothing has ended for a while. It ends nothing: every unit has its own deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Never

from psrl.runtime.supervision import UnitsInFlight

LOOKS_PER_STALL = 10
MAX_UNITS = 8
"""Told; the others are counted."""


class Silence:
    """How long there has been no progress, and when that is worth a word: after `stall_s`, then each time after twice as long."""

    def __init__(self, stall_s: float, *, progress: int, clock: Callable[[], float] = time.monotonic) -> None:
        """It begins now; `progress` is a count that only grows."""
        self._stall_s = stall_s
        self._clock = clock
        self._progress = progress
        self.broken()

    def broken(self) -> None:
        """Something came forward."""
        self._since = self._clock()
        self._told_after_s = self._stall_s

    def look(self, progress: int) -> float:
        """Seconds of silence, 0 where the count has grown."""
        if progress != self._progress:
            self._progress = progress
            self.broken()
        return self._clock() - self._since

    def is_due(self) -> bool:
        """Whether it is to be told now; it is told then, and the next time later."""
        if self._clock() - self._since < self._told_after_s:
            return False
        self._told_after_s *= 2
        return True


class Watchdog:
    """Looks at the units in flight.

    Consumes nothing.
    Waits for: a time without any unit's end; each further report after twice as long.
    Unblocked by: time; cancelled at the end of the run.
    """

    def __init__(self, units: UnitsInFlight, *, stall_s: float, tell: Callable[[str], None]) -> None:
        """`tell` takes the report, for the live view and the run folder."""
        self._units = units
        self._stall_s = stall_s
        self._tell = tell

    async def run(self) -> Never:
        """Until cancelled."""
        silence = Silence(self._stall_s, progress=self._units.num_ended)
        while True:
            await asyncio.sleep(self._stall_s / LOOKS_PER_STALL)
            silence_s = silence.look(self._units.num_ended)
            if not self._units.oldest():
                silence.broken()
            elif silence.is_due():
                self._tell(self._report(time.monotonic(), silence_s))

    def _report(self, now: float, silence_s: float) -> str:
        units = self._units.oldest()
        lines = [f"{unit.what} ({now - unit.began_s:.0f} s, fails after {unit.deadline_s:.0f} s)" for unit in units[:MAX_UNITS]]
        more = f"; and {len(units) - MAX_UNITS} more" if len(units) > MAX_UNITS else ""
        return f"nothing has ended for {silence_s:.0f} s; awaited: {'; '.join(lines)}{more}"
