"""Processes of mini-swe-agent, one per episode, forked from a warm one that each agent worker keeps.

Importing mini-swe-agent's model class takes three seconds of CPU, a fork of the process that has done it a few milliseconds.

Invariant: after `async with`, however it ends, the episode's process and its group are gone and reaped. Where the worker is killed, its
end of the server's socket closes: the server ends, and with it every fork. Proof: tests/agent_loops/test_mini_swe_server.py.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from psrl.errors import ProcessDiedError
from psrl.sandbox.guest_sandbox import LABEL_VARIABLE
from psrl.sandbox.reaper import FOLDER_PREFIX, worker_label

PROGRAM = Path(__file__).with_name("mini_swe_process.py")
START_TIMEOUT_S = 120.0
"""Three seconds of CPU, on a machine whose cores all train."""
ANSWER_TIMEOUT_S = 15.0
"""Longer than the server's own wait for a process that it reaps."""
OUTPUT_TAIL_BYTES = 16 * 1024
MAX_FRAME_BYTES = 64 * 2**20
SIZE = struct.Struct("!I")
ENVIRONMENT = {
    "LANG": "C.UTF-8",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # the gateway tries a turn again; a refusal of the session is final
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it asks the internet for prices: 24 s where there is none
    "LITELLM_LOG": "ERROR",
    "NO_PROXY": "*",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """An episode's process, and the server that reaps it."""

    pid: int
    server_pid: int


class AgentServer:
    """The warm process of one worker. Started when it is first needed, again after it died."""

    def __init__(self) -> None:
        """Nothing runs yet."""
        self._label = worker_label("agent")
        self._turn = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._folder: Path | None = None
        self._output_fd: int | None = None
        self._is_ready = False
        self._is_stopped = False

    def start(self) -> None:
        """Begin to start it, without a wait: it is warm a few seconds later."""
        with self._turn:
            if not self._is_running() and not self._is_stopped:
                self._spawn()

    def fork(self, channel: int, output: int) -> Fork:
        """A new episode's process, which has these descriptors. Blocks until the server is warm.

        Raises:
            ProcessDiedError: The server cannot be started or does not answer; the next call starts another one. Or it cannot fork.
        """
        with self._turn:
            if self._is_stopped:
                raise ProcessDiedError("the run is stopped: no process of mini-swe-agent is started any more")
            if not self._is_running():
                self._spawn()
            answer = self._ask({"fork": True}, (channel, output))
            if "error" in answer:
                raise ProcessDiedError(f"the warm process of mini-swe-agent cannot fork: {answer['error']}")
            assert self._process is not None, "it has just answered"
            return Fork(pid=answer["pid"], server_pid=self._process.pid)

    def end(self, fork: Fork) -> int | None:
        """Kill a fork and its group, and reap it: its exit code, negative for a signal; None where its server is gone, and so it."""
        with self._turn:
            if not self._is_running() or self._process is None or self._process.pid != fork.server_pid:
                return None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(fork.pid, signal.SIGKILL)  # The server reaps it only when asked, so the number is still this process's.
            try:
                exit_code: int | None = self._ask({"reap": fork.pid}, ())["exit_code"]
            except ProcessDiedError:
                return None
            return exit_code

    def stop(self) -> None:
        """End the server and its forks at once, whoever waits for it to be warm; none is started again before `close`."""
        self._is_stopped = True
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """End the server and its forks; may be called twice."""
        with self._turn:
            self._drop()
            self._is_stopped = False

    def _is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _ask(self, request: dict[str, Any], fds: tuple[int, ...]) -> dict[str, Any]:
        assert self._control is not None, "spawned before"
        try:
            if not self._is_ready:
                self._control.settimeout(START_TIMEOUT_S)
                self._receive()
                self._control.settimeout(ANSWER_TIMEOUT_S)
                self._is_ready = True
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            self._control.sendmsg([json.dumps(request).encode()], ancillary)
            return self._receive()
        except (OSError, ValueError) as error:
            words = tail_of(self._output_fd) if self._output_fd is not None else ""
            self._drop()
            raise ProcessDiedError(f"the warm process of mini-swe-agent failed ({error}): {words}") from error

    def _receive(self) -> dict[str, Any]:
        assert self._control is not None, "spawned before"
        answer = self._control.recv(4096)
        if not answer:
            raise ConnectionError("it has ended")
        message: dict[str, Any] = json.loads(answer)
        return message

    def _spawn(self) -> None:
        """Start one, without a wait; what is left of the one before is dropped."""
        self._drop()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{self._label}-"))
        self._output_fd = os.memfd_create("psrl-agent-server")
        home = str(self._folder)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", str(PROGRAM)],
                cwd=home,
                env={
                    "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
                    "HOME": home,
                    "TMPDIR": home,
                    "MSWEA_GLOBAL_CONFIG_DIR": home,
                    LABEL_VARIABLE: self._label,
                    **ENVIRONMENT,
                },
                stdin=theirs.fileno(),
                stdout=self._output_fd,
                stderr=self._output_fd,
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._control, self._is_ready = ours, False
        if self._is_stopped:
            self._process.kill()  # `stop` came while it was made, and could not see it.

    def _drop(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()  # Its forks die with it.
            self._process.wait(ANSWER_TIMEOUT_S)
        if self._output_fd is not None:
            os.close(self._output_fd)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)  # made by `_spawn` with mkdtemp, and nothing else
        self._control, self._process, self._output_fd, self._folder = None, None, None, None


@cache
def agent_server() -> AgentServer:
    """This worker's. Whoever ends the worker closes it; if nobody does, it ends with the worker and leaves its empty home."""
    return AgentServer()


class EpisodeProcess:
    """One episode's process and the channel to it: frames of JSON, one question and one answer at a time."""

    def __init__(self, server: AgentServer) -> None:
        """Nothing is there before `async with`."""
        self._server = server
        self.exit_code: int | None = None
        """After the end: negative is the signal that killed it, -9 where it was still running."""

    async def __aenter__(self) -> EpisodeProcess:
        async with contextlib.AsyncExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.callback(ours.close)
            self._output_fd = os.memfd_create("psrl-agent-output")
            undo.callback(os.close, self._output_fd)
            with theirs:
                self.fork = await self._forked(theirs.fileno())
            undo.push_async_callback(asyncio.to_thread, self._server.end, self.fork)
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            undo.pop_all()
        return self

    async def _forked(self, channel: int) -> Fork:
        forking = asyncio.ensure_future(asyncio.to_thread(self._server.fork, channel, self._output_fd))
        try:
            return await asyncio.shield(forking)
        except asyncio.CancelledError:
            # The thread goes on: what it forks must not be left, and until then the descriptors are its own.
            await asyncio.wait({forking})
            if forking.exception() is None:
                await asyncio.to_thread(self._server.end, forking.result())
            raise

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._writer.close()
            self.exit_code = await asyncio.to_thread(self._server.end, self.fork)
        finally:
            self.output_tail = tail_of(self._output_fd)
            os.close(self._output_fd)

    async def send(self, message: dict[str, Any]) -> None:
        """A frame; what is sent to a process that is gone is lost, as `receive` then says."""
        body = json.dumps(message).encode()
        self._writer.write(SIZE.pack(len(body)) + body)
        with contextlib.suppress(ConnectionError):
            await self._writer.drain()

    async def receive(self) -> dict[str, Any] | None:
        """The next frame; None where the process has ended.

        Raises:
            ProcessDiedError: The frame is none of ours.
        """
        try:
            (size,) = SIZE.unpack(await self._reader.readexactly(SIZE.size))
            if size > MAX_FRAME_BYTES:
                raise ProcessDiedError(f"the agent's process sent a frame of {size} bytes")
            message: dict[str, Any] = json.loads(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        except ValueError as error:
            raise ProcessDiedError(f"the agent's process broke its frames: {error}") from error
        return message


def tail_of(fd: int) -> str:
    """The last 16 KiB that were printed to a file in memory."""
    size = os.fstat(fd).st_size
    return os.pread(fd, OUTPUT_TAIL_BYTES, max(0, size - OUTPUT_TAIL_BYTES)).decode(errors="replace").strip() or "it said nothing"
