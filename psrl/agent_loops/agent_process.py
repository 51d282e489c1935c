"""One run of an agent's command: a child process in a process group of its own, with a folder of its own.

Invariant: after `async with`, however it ends, nothing that the command started is left, whatever became of its process group, and
the folder is gone. This is no sandbox: the command has the worker's user, files and network. Where the worker itself was killed, the
label that it gave to process and folder lets the next one reap them.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from psrl.sandbox.guest_sandbox import LABEL_VARIABLE
from psrl.sandbox.reaper import FOLDER_PREFIX, kill_all_that_mention, worker_label

OUTPUT_TAIL_BYTES = 16 * 1024
READ_BYTES = 64 * 1024
TERM_GRACE_S = 2.0
"""After TERM an agent may take so long to end by itself."""
KILL_GRACE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandEnd:
    """How a command ended by itself."""

    exit_code: int
    """Negative: the signal that killed it."""
    output_tail: str
    """The last 16 KiB of stdout and stderr together."""
    num_output_bytes: int


class AgentProcess:
    """A folder, and one command that runs in it."""

    def __init__(self) -> None:
        """Nothing is there before `async with`."""
        self._label = worker_label("agent")
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._tail = bytearray()
        self._num_output_bytes = 0

    async def __aenter__(self) -> AgentProcess:
        self.folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{self._label}-"))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await self._end()
        finally:
            await asyncio.to_thread(shutil.rmtree, self.folder, True)

    async def run(self, argv: Sequence[str], environment: Mapping[str, str]) -> CommandEnd:
        """Run the command to its end; called once.

        Its environment has nothing of the worker's own: the folder as HOME and TMPDIR, a PATH that begins with this Python's folder,
        and `environment`.

        Raises:
            OSError: It cannot be started.
        """
        home, path = str(self.folder), f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        # A pipe that asyncio knows of would make `wait` wait for everyone who holds it open, and not for the command alone.
        read_end, write_end = os.pipe()
        try:
            self._reading = asyncio.create_task(self._read(await _reader_of(read_end)))
            self._process = await asyncio.create_subprocess_exec(
                *argv,
                cwd=self.folder,
                env={"PATH": path, "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", LABEL_VARIABLE: self._label, **environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                start_new_session=True,
            )
        finally:
            os.close(write_end)
        exit_code = await self._process.wait()
        await self._end()  # What it left behind could hold its output open; after this all that was written is read.
        text = self._tail.decode(errors="replace").strip()
        return CommandEnd(exit_code=exit_code, output_tail=text, num_output_bytes=self._num_output_bytes)

    async def _read(self, output: asyncio.StreamReader) -> None:
        while chunk := await output.read(READ_BYTES):
            self._num_output_bytes += len(chunk)
            self._tail += chunk
            del self._tail[:-OUTPUT_TAIL_BYTES]

    async def _end(self) -> None:
        """TERM and KILL to the group, then KILL to what left it: environment or command line name the folder."""
        if self._process is not None:
            if self._process.returncode is None:
                _signal_group(self._process.pid, signal.SIGTERM)
                await self._wait(TERM_GRACE_S)
            _signal_group(self._process.pid, signal.SIGKILL)
            await asyncio.to_thread(kill_all_that_mention, str(self.folder))
            await self._wait(KILL_GRACE_S)
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=KILL_GRACE_S)
            self._reading.cancel()

    async def _wait(self, timeout_s: float) -> None:
        assert self._process is not None
        await asyncio.wait({asyncio.ensure_future(self._process.wait())}, timeout=timeout_s)


async def _reader_of(pipe: int) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(pipe, "rb", buffering=0))
    return reader


def _signal_group(pid: int, number: signal.Signals) -> None:
    """A group of which nobody is left is done."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return
