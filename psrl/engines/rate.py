"""How many tokens an engine samples a second, over the last seconds; 0 once it has stood still for so long."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

BUCKET_S = 0.25
NUM_BUCKETS = 8
"""The window is the last two seconds: long enough for a slow model's steps, short enough to see a replica run dry."""


class TokenRate:
    """Counts by quarters of a second; added to by the engine's thread, read by any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: deque[tuple[int, int]] = deque()
        """(which quarter of a second, tokens in it), oldest first."""
        self._lock = threading.Lock()

    def add(self, num_tokens: int) -> None:
        """Tokens that were sampled now."""
        index = int(self._clock() / BUCKET_S)
        with self._lock:
            if self._buckets and self._buckets[-1][0] == index:
                num_tokens += self._buckets.pop()[1]
            self._buckets.append((index, num_tokens))
            self._forget(index)

    def per_s(self) -> float:
        """Tokens per second over the window."""
        now = self._clock() / BUCKET_S
        with self._lock:
            self._forget(int(now))
            num_tokens = sum(count for _, count in self._buckets)
        return num_tokens / ((NUM_BUCKETS - 1 + now % 1) * BUCKET_S)

    def _forget(self, index: int) -> None:
        while self._buckets and self._buckets[0][0] <= index - NUM_BUCKETS:
            self._buckets.popleft()
