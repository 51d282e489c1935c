"""Bytes that went over a connection, and the seconds that this took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Flow:
    """Counted since it was last taken."""

    num_bytes: int = 0
    seconds: float = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """Something more went over it."""
        self.num_bytes += num_bytes
        self.seconds += seconds

    def join(self, other: Flow) -> None:
        """What another one counted went over it, too."""
        self.add(other.num_bytes, other.seconds)

    def take(self) -> Flow:
        """What was counted; it begins again at nothing."""
        taken = Flow(self.num_bytes, self.seconds)
        self.num_bytes, self.seconds = 0, 0.0
        return taken
