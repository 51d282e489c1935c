"""What a backend is to a run: one object per worker that makes sandboxes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from typing import Any

from psrl.config.sandbox import SandboxConfig
from psrl.sandbox.guest_sandbox import GuestSandbox
from psrl.types import SandboxSpec


class SandboxBackend(ABC):
    """Holds what its sandboxes share."""

    has_images = False
    """Whether a sandbox can be of an image that the task names."""

    can_open_network = False
    """Whether a sandbox can reach the network and nothing of this machine's own."""

    @abstractmethod
    def __init__(self, settings: SandboxConfig) -> None:
        """ConfigError: the settings cannot work with this backend."""

    async def is_known_to_work(self) -> bool:
        """Whether nothing is left to be checked until a task says which place it needs; False: by a place.

        Raises:
            SandboxUnavailableError: No sandbox can be made here; says the fix.
        """
        return False

    @abstractmethod
    def make(self, *, label: str, spec: SandboxSpec, start_slots: AbstractAsyncContextManager[Any]) -> GuestSandbox:
        """A sandbox that is not started; see `GuestSandbox` for the arguments."""
