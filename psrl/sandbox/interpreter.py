"""A pool of warm sandboxes that runs stateless Python programs: the `ProgramRunner` of a run.

Invariant: every program gets a fresh process; a sandbox is in use by at most one program; one that broke is replaced before it is
used again. The wait for a free sandbox is `queue_s`, never part of `run_s`.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable

from psrl.errors import SandboxError, SandboxUnavailableError
from psrl.protocols import ProgramRunner
from psrl.sandbox.guest_sandbox import GuestSandbox
from psrl.telemetry.waits import waiting
from psrl.types import CommandResult

NUM_TRIES = 2
"""A sandbox that dies once under a program may be the world's fault; twice, with a fresh one, it is the program's."""


class PythonInterpreter(ProgramRunner):
    """Runs up to `num_workers` programs at once; further callers wait in order."""

    def __init__(self, make_sandbox: Callable[[], GuestSandbox], *, num_workers: int) -> None:
        """`make_sandbox` makes a sandbox that is not started yet."""
        assert num_workers > 0, "a pool of no workers never answers"
        self._make_sandbox = make_sandbox
        self._num_workers = num_workers
        self._free: asyncio.Queue[GuestSandbox | None] | None = None
        """Sandboxes that nobody uses; None in it says that the pool has been stopped, to each waiting caller in turn."""
        self._starting = asyncio.Lock()
        self._sandboxes: list[GuestSandbox] = []

    async def start(self) -> None:
        """Start all sandboxes at once; a second call does nothing."""
        async with self._starting:
            if self._free is not None:
                return
            sandboxes = [self._make_sandbox() for _ in range(self._num_workers)]
            is_started = False
            try:
                outcomes = await asyncio.gather(*(sandbox.start() for sandbox in sandboxes), return_exceptions=True)
                for failure in outcomes:
                    if isinstance(failure, BaseException):
                        raise failure
                is_started = True
            finally:
                if not is_started:
                    await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
            self._sandboxes, self._free = sandboxes, asyncio.Queue()
            for sandbox in sandboxes:
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
        """Run one program in a fresh process; see `use`."""
        return await self.use(lambda sandbox: sandbox.run_program(code))

    async def use(self, work: Callable[[GuestSandbox], Awaitable[CommandResult]]) -> CommandResult:
        """What `work` does in a free sandbox, which it leaves empty; it is called once more where the sandbox is lost under it.

        Consumes a free sandbox; waits while all are busy, each no longer than its program's wall time; unblocked by the
        program that ends, or by `stop`.
        """
        await self.start()
        free = self._free
        assert free is not None, "start makes the queue"
        clock = asyncio.get_running_loop().time
        asked = clock()
        with waiting():
            sandbox = await free.get()
        try:
            for _ in range(NUM_TRIES):
                if sandbox is None or self._free is not free:
                    break
                if not sandbox.is_alive:
                    await sandbox.stop()
                    await sandbox.start()
                queue_s = clock() - asked
                try:
                    result = await work(sandbox)
                except SandboxError:
                    continue
                return dataclasses.replace(result, queue_s=queue_s)
            if sandbox is None or self._free is not free:
                raise SandboxError("the interpreter has been stopped")
            run_s = clock() - asked - queue_s
            return CommandResult(stdout=b"", stderr=b"", exit_code=None, killed_by="sandbox_lost", queue_s=queue_s, run_s=run_s)
        finally:
            if sandbox is not None and self._free is not free:
                await sandbox.stop()  # it may have been started again after `stop` had stopped it
            free.put_nowait(sandbox)

    async def stop(self) -> None:
        """End every sandbox with the programs in it, refuse who still waits; may be called twice, and started again after."""
        sandboxes, self._sandboxes, free, self._free = self._sandboxes, [], self._free, None
        if free is not None:
            free.put_nowait(None)
        await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
