"""The stall loop: a run in which nothing comes forward says why, and one that nobody can bring forward any more ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from psrl.errors import DeadlineError
from psrl.runtime.board import Board
from psrl.runtime.supervision import UNITS
from psrl.runtime.watchdog import LOOKS_PER_STALL, Silence

MAX_NAMED = 8
"""Groups and units that a report names; the others are counted."""
NUM_STALLS_WITHOUT_WORK = 5
"""With nothing in flight at all the run ends after so many times `stall_s`: nothing is left that could have an end."""


class StallLoop:
    """Watches that groups end, steps are made or validation tasks are played.

    Everything in flight has a deadline of its own and ends by it. What this loop ends is a run in which nothing is in flight and nothing
    may begin: a mistake in the decisions about admission and weights, which would otherwise wait for ever without a word.

    Consumes: nothing.
    Waits for: a time without progress; each further report after twice as long.
    Unblocked by: time.
    """

    def __init__(
        self,
        *,
        board: Board,
        stall_s: float,
        progress: Callable[[], int],
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`progress` only grows; `tell` takes a report."""
        self._board = board
        self._stall_s = stall_s
        self._progress = progress
        self._tell = tell
        self._clock = clock

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            DeadlineError: Nothing was in flight for `NUM_STALLS_WITHOUT_WORK` times `stall_s`.
        """
        silence = Silence(self._stall_s, progress=self._progress(), clock=self._clock)
        working = self._clock()
        while True:
            await asyncio.sleep(self._stall_s / LOOKS_PER_STALL)
            silence_s = silence.look(self._progress())
            if self._is_working():
                working = self._clock()
            # Progress is a sign of work, too: a group may begin and end between two looks.
            idle_s = min(silence_s, self._clock() - working)
            if idle_s >= NUM_STALLS_WITHOUT_WORK * self._stall_s:
                raise DeadlineError(f"the run stands still: {self._report(silence_s)}")
            if silence.is_due():
                self._tell(self._report(silence_s))

    def _is_working(self) -> bool:
        """Whether something is under way that has an end of its own: a group, a step, a sync, a push, a validation, a restart."""
        is_changing = any(instance.is_syncing or not instance.is_up for instance in self._board.coordinator.instances)
        # Questions that are asked all the time, such as for loads, are shorter than a look.
        is_awaited = any(time.monotonic() - unit.began_s > self._stall_s / LOOKS_PER_STALL for unit in UNITS.oldest())
        return self._board.num_in_flight > 0 or is_changing or is_awaited

    def _report(self, silence_s: float) -> str:
        groups = self._board.outstanding()
        named = [
            f"{each.group} (V{each.version}, instances {sorted(set(each.instances))}, {each.age_s:.0f} s)" for each in groups[:MAX_NAMED]
        ]
        units = [unit.what for unit in UNITS.oldest()[:MAX_NAMED]]
        instances = [
            f"{each.index}: V{each.version}, {each.num_episodes} episodes"
            + ("" if each.is_up else ", down")
            + (", taking weights" if each.is_syncing else "")
            for each in self._board.coordinator.instances
        ]
        return (
            f"no group, step or validation task has ended for {silence_s:.0f} s; the trainer has weights {self._board.version}, "
            f"{len(self._board.arrived)} groups wait for their update, {len(groups)} are in flight: {'; '.join(named) or 'none'}; "
            f"instances {'; '.join(instances)}; awaited: {'; '.join(units) or 'nothing'}"
        )
