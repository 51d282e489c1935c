"""Sandbox without isolation: an ordinary child process in a temporary folder. Only for code that is trusted.

Wall time, CPU, memory, file size and output are bounded as everywhere; the network and the host's files are open, and the number of
processes and the disk are watched rather than held by the kernel.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from psrl.config.sandbox import SandboxConfig
from psrl.sandbox.backend import SandboxBackend
from psrl.sandbox.guest_sandbox import LABEL_VARIABLE
from psrl.sandbox.local_guest import GuestCommand, LocalGuestSandbox, load_guest
from psrl.sandbox.packages import packages_of
from psrl.sandbox.reaper import FOLDER_PREFIX, kill_all_that_mention
from psrl.types import SandboxSpec


class ProcessBackend(SandboxBackend):
    """Chosen by name only (`sandbox.backend=process`). Programs have the worker's own Python with all that is installed for it."""

    def __init__(self, settings: SandboxConfig) -> None:
        """ConfigError: a package is not installed."""
        packages_of(settings.packages)

    def make(self, *, label: str, spec: SandboxSpec, start_slots: AbstractAsyncContextManager[Any]) -> ProcessSandbox:
        """See `SandboxBackend`."""
        return ProcessSandbox(label=label, spec=spec, start_slots=start_slots)


class ProcessSandbox(LocalGuestSandbox):
    """Its workdir is a temporary folder whatever the spec says: the host's is shared."""

    _folder: str | None = None

    def _command(self) -> GuestCommand:
        self._remove_folder()
        self._folder = tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{self.label}-")
        env = {
            "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
            "HOME": self._folder,
            "TMPDIR": self._folder,
            "LANG": "C.UTF-8",
            "LC_ALL": "C.UTF-8",
            "LD_BIND_NOW": "1",
        }
        return GuestCommand(
            argv=(sys.executable, "-E", "-s", "-B", "-c", load_guest(str(Path(__file__).parent)), "shared", self._folder, self._folder),
            env={**env, LABEL_VARIABLE: self.label},
            cwd=self._folder,
        )

    async def _remove(self) -> None:
        self._remove_folder()

    def _remove_folder(self) -> None:
        if self._folder is not None:
            # What a guest that was killed in the middle of a call had under it; its environment names the folder.
            kill_all_that_mention(self._folder)
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
