"""A pool of warm sandboxes that runs stateless Python programs: the `ProgramRunner` of a run.

Invariant: every program gets a fresh process; a sandbox is in use by at most one program; one that broke is replaced before it is
used again. The wait for a free sandbox is `queue_s`, never part of `run_s`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable

from psrl.errors import SandboxError, SandboxUnavailableError
from psrl.protocols import CommandResult, ProgramRunner
from psrl.sandbox.guest_sandbox import GuestSandbox

NUM_TRIES = 2
"""A sandbox that dies once under a program may be the world's fault; twice, with a fresh one, it is the program's."""


class PythonInterpreter(ProgramRunner):
    """Runs up to `num_workers` programs at once; further callers wait in order."""

    def __init__(self, make_sandbox: Callable[[], GuestSandbox], *, num_workers: int) -> None:
        """`make_sandbox` makes a sandbox that is not started yet."""
        assert num_workers > 0, "a pool of no workers never answers"
        self._make_sandbox = make_sandbox
        self._num_workers = num_workers
        self._free: asyncio.Queue[GuestSandbox] | None = None
        self._sandboxes: list[GuestSandbox] = []

    async def start(self) -> None:
        """Start all sandboxes at once; a second call does nothing."""
        if self._free is not None:
            return
        self._free = asyncio.Queue(self._num_workers)
        self._sandboxes = [self._make_sandbox() for _ in range(self._num_workers)]
        outcomes = await asyncio.gather(*(sandbox.start() for sandbox in self._sandboxes), return_exceptions=True)
        for failure in outcomes:
            if isinstance(failure, BaseException):
                await self.stop()
                raise failure
        for sandbox in self._sandboxes:
            self._free.put_nowait(sandbox)

    async def preflight(self) -> None:
        """Run `print(2+3)`; SandboxUnavailableError with what came instead of 5."""
        await self.start()
        result = await self.run_program("print(2+3)")
        if result.exit_code != 0 or result.stdout != b"5\n":
            raise SandboxUnavailableError(
                f"print(2+3) must print 5 but the sandbox gave {result.stdout!r}, {result.stderr!r}, exit code {result.exit_code}, "
                f"killed by {result.killed_by}. Fix: raise sandbox.wall_s and sandbox.memory_mb, and look for an overloaded machine"
            )

    async def run_program(self, code: str) -> CommandResult:
        """Run one program in a fresh process; waits for a free sandbox, each of which is bounded by the wall time of its program."""
        await self.start()
        assert self._free is not None, "start makes the queue"
        clock = asyncio.get_running_loop().time
        asked = clock()
        sandbox = await self._free.get()
        try:
            for _ in range(NUM_TRIES):
                if not sandbox.is_alive:
                    sandbox = await self._replace(sandbox)
                queue_s = clock() - asked
                try:
                    result = await sandbox.run_program(code)
                except SandboxError:
                    continue
                return dataclasses.replace(result, queue_s=queue_s)
            return CommandResult(
                stdout=b"", stderr=b"", exit_code=None, killed_by="sandbox_lost", queue_s=queue_s, run_s=clock() - asked - queue_s
            )
        finally:
            self._free.put_nowait(sandbox)

    async def stop(self) -> None:
        """End every sandbox with the programs in it; may be called twice."""
        sandboxes, self._sandboxes, self._free = self._sandboxes, [], None
        await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))

    async def _replace(self, broken: GuestSandbox) -> GuestSandbox:
        await broken.stop()
        await broken.start()
        return broken
