"""A server that is started again on its own port when it ends, so that whoever knows its URL need not learn a new one."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Never

from psrl.errors import ProcessDiedError
from psrl.processes.child import STOP_GRACE_S, ChildProcess

HISTORY_CHARACTERS = 120
"""Of each earlier end, when a process is given up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartLimit:
    """How often a server may end before it is given up: more than `max_restarts` times within `window_s` seconds."""

    max_restarts: int = 5
    window_s: float = 300.0


class RestartHistory:
    """The ends of one process, by whoever starts it again."""

    def __init__(self, name: str, limit: RestartLimit, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._limit = limit
        self._clock = clock
        self._ends: deque[tuple[float, str]] = deque()
        self.num_restarts = 0

    def ended(self, cause: str) -> None:
        """It ended again; returns where it may be started once more.

        Raises:
            ProcessDiedError: It ended more than `max_restarts` times within the window; with all these causes.
        """
        now = self._clock()
        self._ends.append((now, cause))
        while self._ends[0][0] < now - self._limit.window_s:
            self._ends.popleft()
        if len(self._ends) <= self._limit.max_restarts:
            self.num_restarts += 1
            return
        if len(self._ends) == 1:
            raise ProcessDiedError(f"{self._name} died: {cause}")
        history = "; ".join(f"{now - at_s:.0f} s ago: {why[:HISTORY_CHARACTERS]}" for at_s, why in list(self._ends)[:-1])
        times = f"{len(self._ends)} times within {self._limit.window_s:.0f} s"
        raise ProcessDiedError(f"{self._name} died {times}, the last time: {cause} (before: {history})")


class KeptProcess:
    """One server at one URL, through the processes that serve it in turn."""

    def __init__(
        self,
        make: Callable[[int], ChildProcess],
        *,
        limit: RestartLimit,
        startup_timeout_s: float,
        report: Callable[[str], None],
    ) -> None:
        """`make(port)` gives the next process (0: on any free port); `report` gets a line for every restart."""
        self._make = make
        self._limit = limit
        self._startup_timeout_s = startup_timeout_s
        self._report = report
        self._process: ChildProcess | None = None
        self.num_restarts = 0

    @property
    def process(self) -> ChildProcess:
        """The one that serves now."""
        assert self._process is not None, "start() comes first"
        return self._process

    @property
    def url(self) -> str:
        """The same for as long as it is kept."""
        return self.process.url

    async def start(self, *, port: int = 0) -> None:
        """The first process, until it is ready; on any free port, or on that of one that died.

        Raises:
            ProcessDiedError: With its last words.
        """
        assert self._process is None, "start() comes once"
        self._process = self._make(port)
        await self._process.start(self._startup_timeout_s)

    async def keep(self) -> Never:
        """Start it again whenever it ends or falls silent; never returns.

        Consumes nothing; waits for the process to be lost; unblocked by its end, by its silence, or cancelled.

        Raises:
            ProcessDiedError: It was lost once too often within the window, or did not come up again; with its last words.
        """
        history = RestartHistory(self.process.name, self._limit)
        while True:
            cause = await self.process.lost()
            await asyncio.to_thread(self.process.stop, 0.0)  # one that only answers nothing
            history.ended(cause)
            self._report(f"{cause.partition('; last words')[0]}; it is started again. Last words: {self.process.last_words()[-300:]}")
            self._process = self._make(self.process.port)
            await self._process.start(self._startup_timeout_s)
            self.num_restarts += 1

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End it; may be called twice, and without a start. Cancel `keep` first."""
        if self._process is not None:
            await asyncio.to_thread(self._process.stop, grace_s)
