"""Code execution as a service: servers of `psrl.sandbox_server` as children of one process, each on a port of its own. No Ray.

A server that ends is started again on its port. One process is one Python, which feeds some cores and no more; several beside each
other scale with the machine, and clients spread over their URLs.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Never

from psrl.config.sandbox import SandboxConfig
from psrl.processes.child import ChildProcess
from psrl.processes.kept import KeptProcess, RestartLimit

STARTUP_TIMEOUT_S = 120.0
STOP_GRACE_S = 10.0
"""Above what a server gives the programs that run in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxServiceSettings:
    """What is served, and where."""

    sandbox: SandboxConfig
    """Backend and limits of the programs; `num_workers` of each server run at once."""
    log_folder: Path
    num_servers: int = 1
    max_queue: int = 256
    """Requests that wait in each server; further ones are answered 429."""
    max_queue_s: float = 60.0
    host: str = "127.0.0.1"
    port: int = 8080
    """Of the first server, the others follow; 0: any free ones."""
    api_key_file: Path | None = None


class SandboxService:
    """The servers, from start to stop."""

    def __init__(self, settings: SandboxServiceSettings, *, report: Callable[[str], None]) -> None:
        """`report` gets a line for every restart."""
        self._settings = settings
        self._servers = tuple(self._kept(index, report) for index in range(settings.num_servers))

    @property
    def urls(self) -> tuple[str, ...]:
        """What clients are told, once started."""
        return tuple(server.url for server in self._servers)

    async def start(self) -> None:
        """Until every server has run a program.

        Raises:
            ProcessDiedError: One did not come up, with its last words; those that did run until `stop`.
        """
        port = self._settings.port
        await asyncio.gather(*(server.start(port=port + index if port else 0) for index, server in enumerate(self._servers)))

    async def watch(self) -> Never:
        """Keep them up; never returns.

        Waits for: a server that cannot be started again. Unblocked by: that, or cancelled.

        Raises:
            ProcessDiedError: Names it, with its last words.
        """
        tasks = [asyncio.create_task(server.keep()) for server in self._servers]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(iter(done)).result()
        finally:
            for task in tasks:
                task.cancel()

    async def stop(self) -> None:
        """End them with all that runs in them; may be called twice. Cancel `watch` first."""
        await asyncio.gather(*(server.stop(STOP_GRACE_S) for server in self._servers))

    def _kept(self, index: int, report: Callable[[str], None]) -> KeptProcess:
        settings, argv = self._settings, server_command(self._settings)
        return KeptProcess(
            lambda port: ChildProcess(
                f"sandbox server {index}",
                argv,
                log_path=settings.log_folder / f"sandbox-server-{index}.log",
                host=settings.host,
                port=port,
            ),
            limit=RestartLimit(),
            startup_timeout_s=STARTUP_TIMEOUT_S,
            report=report,
        )


def server_command(settings: SandboxServiceSettings) -> list[str]:
    """The program of one server, without where it listens."""
    sandbox = settings.sandbox
    options = {
        "backend": sandbox.backend,
        "num-workers": sandbox.num_workers,
        "max-queue": settings.max_queue,
        "max-queue-s": settings.max_queue_s,
        "wall-s": sandbox.wall_s,
        "cpu-s": sandbox.cpu_s,
        "memory-mb": sandbox.memory_mb,
        "num-processes": sandbox.num_processes,
        "output-kb": sandbox.output_kb,
        "disk-mb": sandbox.disk_mb,
        "packages": ",".join(sandbox.packages),
    }
    argv = [sys.executable, "-m", "psrl.sandbox_server"]
    for name, value in options.items():
        argv += [f"--{name}", str(value)]
    return argv if settings.api_key_file is None else [*argv, "--api-key-file", str(settings.api_key_file)]
