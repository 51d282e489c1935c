"""What a program writes, kept within a cap. Standard library only (Python 3.9 or newer): this file is copied into the sandbox."""

from __future__ import annotations

import os


class Collector:
    """Keeps the head and the tail of a stream and counts what lay between."""

    def __init__(self, fd: int, cap: int) -> None:
        """Reads from `fd`; keeps at most `cap` bytes beside the line that says how many were dropped."""
        self.fd = fd
        self.total = 0
        self._head_cap = cap // 2
        self._tail_cap = cap - cap // 2
        self._head = bytearray()
        self._tail = bytearray()

    def read(self) -> bool:
        """Take what is there; False at the end of the stream."""
        chunk = os.read(self.fd, 65536)
        self.total += len(chunk)
        room = self._head_cap - len(self._head)
        self._head += chunk[:room]
        self._tail += chunk[room:]
        if len(self._tail) > 2 * self._tail_cap + 65536:
            del self._tail[: -self._tail_cap or None]
        return bool(chunk)

    @property
    def dropped(self) -> int:
        """Bytes that are not kept."""
        return max(0, self.total - self._head_cap - self._tail_cap)

    def kept(self) -> bytes:
        """Head and tail, with a line between them if anything was dropped."""
        if not self.dropped:
            return bytes(self._head + self._tail)
        tail = self._tail[len(self._tail) - self._tail_cap :]
        return bytes(self._head) + b"\n[... %d bytes dropped ...]\n" % self.dropped + bytes(tail)
