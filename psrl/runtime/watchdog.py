"""Says what a run waits for, and who holds it, when nothing has ended for a while. It ends nothing: every unit has its own deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Never

from psrl.runtime.supervision import UnitsInFlight

MAX_UNITS = 8
"""Told; the others are counted."""


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
        num_ended, since, told_after_s = self._units.num_ended, time.monotonic(), self._stall_s
        while True:
            await asyncio.sleep(self._stall_s / 10)
            now = time.monotonic()
            if self._units.num_ended != num_ended or not self._units.oldest():
                num_ended, since, told_after_s = self._units.num_ended, now, self._stall_s
            elif now - since >= told_after_s:
                self._tell(self._report(now, now - since))
                told_after_s *= 2

    def _report(self, now: float, silence_s: float) -> str:
        units = self._units.oldest()
        lines = [f"{unit.what} ({now - unit.began_s:.0f} s, fails after {unit.deadline_s:.0f} s)" for unit in units[:MAX_UNITS]]
        more = f"; and {len(units) - MAX_UNITS} more" if len(units) > MAX_UNITS else ""
        return f"nothing has ended for {silence_s:.0f} s; awaited: {'; '.join(lines)}{more}"
