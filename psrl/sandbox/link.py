"""The byte stream between a sandbox's host side and its guest: how it is made and ended is the backend's, the frames on it are not.

Invariant: after `end` nothing of the guest is left. `cut` may be called at any time and makes every read in progress end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class GuestLink(ABC):
    """One started guest."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether the guest could answer, as far as this side knows."""

    @abstractmethod
    async def send(self, data: bytes) -> None:
        """All of `data`. ConnectionError where the guest is gone."""

    @abstractmethod
    async def receive(self, size: int) -> bytes:
        """Exactly `size` bytes. ConnectionError where the guest is gone."""

    @abstractmethod
    def cut(self) -> None:
        """Kill the guest, or make it end itself; never waits."""

    @abstractmethod
    async def last_words(self) -> str:
        """What a guest that was cut had written to stderr."""

    @abstractmethod
    async def end(self) -> None:
        """Wait until the guest and all that ran in it are gone, and free what the link holds.

        Raises:
            SandboxError: They are not gone in time.
        """

    async def is_there(self) -> bool:
        """Whether the place of a guest that is late is still there and running: then what runs inside made it late."""
        return True
