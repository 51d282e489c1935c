"""Memory that the C library holds though nothing uses it, given back now and then.

Micro-batches of ever new shapes leave holes in malloc's heap, which glibc keeps for later: a train worker of `retool_tiny` held 630 MiB
after 20 steps and 684 after 40, of which 320 were in use at both times, and went on growing by some 200 MiB an hour. `malloc_trim`
returns the holes. A trim and the page faults of the step after it take 0.17 s of CPU there, 13% of a step, so it is done by the clock.
"""

from __future__ import annotations

import ctypes
import time

TRIM_EVERY_S = 60.0


class Heap:
    """The C heap of this process."""

    def __init__(self, *, trim_every_s: float = TRIM_EVERY_S) -> None:
        """Nothing is given back for the first `trim_every_s`."""
        # Only glibc has it; musl and macOS give memory back by themselves.
        self._malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._every_s = trim_every_s
        self._trimmed_at_s = time.monotonic()

    def give_back(self) -> None:
        """Return what is not in use to the operating system, if the last time is long enough ago."""
        now_s = time.monotonic()
        if self._malloc_trim is None or now_s - self._trimmed_at_s < self._every_s:
            return
        self._malloc_trim(0)
        self._trimmed_at_s = now_s
