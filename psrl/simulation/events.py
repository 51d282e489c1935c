"""Virtual time: what happens next, and when.

Events of the same moment happen in the order in which they were asked for, so a simulation is a function of its seed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Event:
    """Something that will happen unless it is cancelled."""

    __slots__ = ("_action", "at_s")

    def __init__(self, at_s: float, action: Action) -> None:
        self.at_s = at_s
        self._action: Action | None = action

    def cancel(self) -> None:
        """It will not happen; may be called at any time."""
        self._action = None

    def happen(self) -> bool:
        """Do it once; False where it was cancelled."""
        action, self._action = self._action, None
        if action is None:
            return False
        action()
        return True


class EventQueue:
    """The clock, and what is to come."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Event]] = []
        self._num_asked = 0

    def after(self, delay_s: float, action: Action) -> Event:
        """`action` in `delay_s` seconds, 0 included: then after what is already due now."""
        assert delay_s >= 0, f"an event {delay_s} s from now"
        event = Event(self.now_s + delay_s, action)
        heapq.heappush(self._heap, (event.at_s, self._num_asked, event))
        self._num_asked += 1
        return event

    def step(self) -> bool:
        """Let the next event happen; False where nothing is to come."""
        while self._heap:
            at_s, _, event = heapq.heappop(self._heap)
            self.now_s, before_s = at_s, self.now_s
            if event.happen():
                return True
            self.now_s = before_s
        return False
