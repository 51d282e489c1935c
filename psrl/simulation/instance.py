"""A rollout instance: slots in which turns are sampled, and a queue before them, ordered by (priority, arrival).

Time inside a turn is counted in work. All running turns are worked at by the same rate, which may fall with their number (decoding
larger batches takes longer), and is 0 while the instance is paused. So one clock of work per instance serves every turn: a turn that
starts when the clock shows w and needs x ends when it shows w + x, whatever happens to the rate in between.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from psrl.simulation.events import Event, EventQueue
from psrl.staleness import InstanceLoad
from psrl.types import PolicyVersion

RATE_WINDOW_S = 2.0
"""Over which an engine tells tokens per second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Seconds that one unit of work takes while n turns run in a replica: base_s + n * per_running_s."""

    base_s: float = 1.0
    """1 with work in seconds; with work in tokens, seconds of a decode step."""
    per_running_s: float = 0.0

    def seconds(self, num_running: float) -> float:
        """Of one unit of work; `num_running` may be a mean."""
        return self.base_s + self.per_running_s * num_running

    def rate(self, num_running: float) -> float:
        """Units of work per second, for each turn."""
        return 1.0 / self.seconds(num_running)


class Turn:
    """A request for one turn; `on_end(turn)` is called once, when it is sampled whole or given back."""

    __slots__ = ("ends_at", "num_tokens", "oldest", "on_end", "priority", "seconds", "started_s", "work")

    def __init__(self, *, work: float, num_tokens: float, priority: int, on_end: Callable[[Turn], None]) -> None:
        self.work = work
        """Left to do; 0 when sampled whole."""
        self.num_tokens = num_tokens
        """Of the whole turn."""
        self.priority = priority
        self.on_end = on_end
        self.ends_at = 0.0
        """What the instance's clock of work will show then; of a running turn."""
        self.started_s = 0.0
        self.seconds = 0.0
        """In a slot so far, pauses included."""
        self.oldest: PolicyVersion | None = None
        """Weights that sampled its first token."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing of it is left."""
        return self.work <= 0.0


class Instance:
    """One replica, or all of them where a gateway places the turns."""

    def __init__(self, events: EventQueue, *, num_slots: int, pace: Pace, version: PolicyVersion, num_replicas: int = 1) -> None:
        """`num_slots` of all its replicas, among which turns are spread evenly."""
        self.version = version
        self.num_slots = num_slots
        self.num_replicas = num_replicas
        self.is_up = True
        self.busy_slot_s = 0.0
        """Integral over time of the turns that run, pauses included."""
        self.paused_s = 0.0
        self.down_s = 0.0
        self.num_syncs = 0
        self._events = events
        self._pace = pace
        self._rate = pace.rate(0)
        self._worked = 0.0
        """Work that was done, by all turns."""
        self._looks: deque[tuple[float, float]] = deque([(events.now_s, 0.0)])
        """When the load was asked for, and the work that was done by then; from `RATE_WINDOW_S` ago on."""
        self._running: dict[Turn, None] = {}
        self._ends: list[tuple[float, int, Turn]] = []
        """Heap of (clock of work, arrival, turn); turns that were given back are skipped."""
        self._queue: list[tuple[int, int, Turn]] = []
        self._queued: set[Turn] = set()
        self._arrivals = itertools.count()
        self._clock = 0.0
        self._clock_s = 0.0
        """When the clock of work was read last."""
        self._next_end: Event | None = None
        self._next_turn: Turn | None = None
        self._is_paused = False
        self._is_draining = False
        self._on_drained: Callable[[], None] | None = None

    @property
    def num_running(self) -> int:
        """Turns in a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Turns in the queue."""
        return len(self._queued)

    def load(self, *, tokens_per_work: float) -> InstanceLoad:
        """What the coordinator is told of it."""
        self.read_clock()
        now_s = self._events.now_s
        self._looks.append((now_s, self._worked))
        while len(self._looks) > 1 and self._looks[1][0] <= now_s - RATE_WINDOW_S:
            self._looks.popleft()
        since_s, before = self._looks[0]
        rate = (self._worked - before) / max(RATE_WINDOW_S, now_s - since_s)
        return InstanceLoad(
            num_running=len(self._running),
            num_waiting=len(self._queued),
            tokens_per_s=rate * tokens_per_work,
            cache_usage=len(self._running) / self.num_slots,
        )

    def submit(self, turn: Turn) -> None:
        """Sample it as soon as there is a slot."""
        assert self.is_up, "a turn for an instance that is down"
        heapq.heappush(self._queue, (turn.priority, next(self._arrivals), turn))
        self._queued.add(turn)
        self._fill()

    def give_back(self, turn: Turn) -> None:
        """End it as it is, without calling `on_end`: its owner wants no more of it."""
        if turn in self._queued:
            self._queued.remove(turn)
        else:
            self.read_clock()
            self._leave_slot(turn)
            self._fill()

    def pause(self) -> None:
        """Stand still; turns keep what they have."""
        self.read_clock()
        self._is_paused, self._is_draining, self._on_drained = True, False, None
        self._plan_next_end()

    def pause_and_give_back(self) -> None:
        """Stand still and end every turn as it is: first those that ran, then those that waited, so that they come again in this order."""
        self.pause()
        running, waiting = list(self._running), self._waiting()
        self._queue, self._queued = [], set()
        for turn in running:
            self._leave_slot(turn)
        for turn in (*running, *waiting):
            turn.on_end(turn)

    def drain(self, on_drained: Callable[[], None]) -> None:
        """Start no turn any more; `on_drained` is called when the last running one has ended."""
        self._is_draining, self._on_drained = True, on_drained
        self._end_drain()

    def resume(self) -> None:
        """Go on."""
        self.read_clock()
        self._is_paused = self._is_draining = False
        self._fill()

    def die(self) -> list[Turn]:
        """All its turns, those that ran and those that waited, in that order; what they had when they came to it is left of them."""
        self.read_clock()
        lost = [*self._running, *self._waiting()]
        self._running, self._ends, self._queue, self._queued = {}, [], [], set()
        self.is_up, self._is_paused, self._is_draining, self._on_drained = False, False, False, None
        self._plan_next_end()
        return lost

    def come_up(self, version: PolicyVersion) -> None:
        """Restarted with the weights of `version`."""
        self.read_clock()
        self.is_up, self.version = True, version
        self._looks = deque([(self._events.now_s, self._worked)])

    def read_clock(self) -> None:
        """Count the time until now; before anything that changes who runs, and before the sums are read."""
        elapsed_s = self._events.now_s - self._clock_s
        if elapsed_s > 0:
            self._clock_s = self._events.now_s
            self.busy_slot_s += elapsed_s * len(self._running)
            if not self.is_up:
                self.down_s += elapsed_s
            elif self._is_paused:
                self.paused_s += elapsed_s
            else:
                self._clock += elapsed_s * self._rate
                self._worked += elapsed_s * self._rate * len(self._running)

    def _waiting(self) -> list[Turn]:
        """In the order in which they would get a slot."""
        return [turn for *_, turn in sorted(self._queue, key=lambda entry: entry[:2]) if turn in self._queued]

    def _fill(self) -> None:
        self.read_clock()
        starts = not self._is_paused and not self._is_draining
        while starts and len(self._running) < self.num_slots and self._queued:
            *_, turn = heapq.heappop(self._queue)
            if turn in self._queued:
                self._queued.remove(turn)
                self._running[turn] = None
                turn.started_s, turn.ends_at = self._events.now_s, self._clock + turn.work
                turn.oldest = self.version if turn.oldest is None else turn.oldest
                heapq.heappush(self._ends, (turn.ends_at, next(self._arrivals), turn))
        self._plan_next_end()

    def _leave_slot(self, turn: Turn) -> None:
        del self._running[turn]
        turn.work = max(0.0, turn.ends_at - self._clock)
        turn.seconds += self._events.now_s - turn.started_s
        if self._is_draining:
            self._end_drain()

    def _end_drain(self) -> None:
        if not self._running and self._on_drained is not None:
            on_drained, self._on_drained = self._on_drained, None
            self._events.after(0.0, on_drained)

    def _plan_next_end(self) -> None:
        while self._ends and (self._ends[0][2] not in self._running or self._ends[0][0] != self._ends[0][2].ends_at):
            heapq.heappop(self._ends)  # given back, and perhaps here again with another end
        rate_before, self._rate = self._rate, self._pace.rate(len(self._running) / self.num_replicas)
        if not self._ends or self._is_paused:
            self._forget_next_end()
            return
        turn = self._ends[0][2]
        if self._next_end is None or self._next_turn is not turn or self._rate != rate_before:
            self._forget_next_end()
            self._next_turn = turn
            self._next_end = self._events.after(max(0.0, turn.ends_at - self._clock) / self._rate, self._end_next)

    def _forget_next_end(self) -> None:
        if self._next_end is not None:
            self._next_end.cancel()
            self._next_end = None

    def _end_next(self) -> None:
        self._next_end = None
        self.read_clock()
        turn = self._ends[0][2]
        self._clock = max(self._clock, turn.ends_at)  # floats: what is due is done
        self._leave_slot(turn)
        turn.work = 0.0
        self._fill()
        turn.on_end(turn)
