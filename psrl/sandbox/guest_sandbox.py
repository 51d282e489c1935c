"""The host's side of one sandbox: starts its guest, exchanges frames with it, and kills it when it does not answer.

Invariant: a sandbox whose exchange did not come to its end (time, cancellation, broken frame) is dead afterwards and is never used
again. Subclasses say only which command makes the place.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from psrl.errors import SandboxError, SandboxUnavailableError
from psrl.protocols import Sandbox
from psrl.types import CommandResult, SandboxLimits, SandboxSpec

FRAME = struct.Struct("!II")
GUEST_FILES = ("guest.py", "guest_interpreter.py")
START_TIMEOUT_S = 30.0
"""Generous: a machine whose cores all train still starts a Python in it."""
ANSWER_GRACE_S = 5.0
"""The guest ends a program at its wall time; a guest that is this late is itself in trouble."""
MAX_HEADER_BYTES = 65536
LABEL_VARIABLE = "PSRL_SANDBOX"


@dataclass(frozen=True, kw_only=True, slots=True)
class GuestCommand:
    """How to start a guest."""

    argv: tuple[str, ...]
    env: dict[str, str]
    cwd: str
    user: int | None = None
    """Uid and gid to drop to first; None keeps the worker's."""
    pass_fds: tuple[int, ...] = ()
    """Open files that argv names; closed here once the guest has started."""
    guest_pid_fd: int | None = None
    """Gives JSON with the guest's pid as `child-pid`, where the guest is not the started process itself."""


def guest_source(name: str) -> bytes:
    """The text of one of GUEST_FILES."""
    return (Path(__file__).parent / name).read_bytes()


class GuestSandbox(Sandbox):
    """A `Sandbox` that a guest process serves. One call at a time; callers beyond that wait."""

    def __init__(self, *, label: str, spec: SandboxSpec) -> None:
        """`label` marks what belongs to this worker (see reaper.py); the limits of `spec` are the defaults of `run`."""
        self.label = label
        self.spec = spec
        self.limits = spec.limits
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._guest_pidfd: int | None = None
        self._is_killed = False
        self._turn = asyncio.Lock()

    @abstractmethod
    def _command(self) -> GuestCommand:
        """Make what the guest needs and say how to start it."""

    def _remove(self) -> None:
        """Remove what `_command` made; may be called twice."""
        return

    @property
    def is_alive(self) -> bool:
        """Whether a call can be made."""
        return not self._is_killed and self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Start the guest and wait until it is ready; SandboxUnavailableError with its last words if it never is."""
        if self.is_alive:
            return
        command = self._command()
        try:
            self._spawn(command)
            header, _ = await self._exchange(None, b"", timeout_s=START_TIMEOUT_S)
            if header != {"ready": True}:
                raise SandboxError(f"the guest said {header}")
            self._guest_pidfd = os.pidfd_open(self._guest_pid(command))
        except (SandboxError, OSError) as error:  # TimeoutError is one
            self._kill()
            words = await asyncio.to_thread(self._last_words)
            await self.stop()
            raise SandboxUnavailableError(f"sandbox did not start ({error}): {words}. Fix: {self._fix()}") from error
        finally:
            if command.guest_pid_fd is not None:
                os.close(command.guest_pid_fd)

    def _spawn(self, command: GuestCommand) -> None:
        """On the caller's thread, since the kernel ends the child when its parent thread ends."""
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                command.argv,
                env=command.env,
                cwd=command.cwd,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=command.pass_fds,
                user=command.user,
                group=command.user,
                extra_groups=None if command.user is None else (),
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            for fd in command.pass_fds:
                os.close(fd)
        ours.setblocking(False)
        self._socket, self._is_killed = ours, False

    def _guest_pid(self, command: GuestCommand) -> int:
        if command.guest_pid_fd is not None:
            pid: int = json.loads(os.read(command.guest_pid_fd, 4096))["child-pid"]
            return pid
        assert self._process is not None, "spawned before"
        return self._process.pid

    def _fix(self) -> str:
        return "install a Python 3.9 or newer that every user may run"

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limits: SandboxLimits | None = None,
    ) -> CommandResult:
        """Run a program to its end or its limit; a command that cannot be run exits with 127, one whose `cwd` is missing with 1.

        `limits` bound this program only; the disk and the network stay as the sandbox was started with.
        """
        request = {"op": "command", "argv": list(argv), "env": dict(env or {}), "cwd": cwd}
        return await self._call(request, stdin, limits or self.limits)

    async def run_program(self, code: str) -> CommandResult:
        """Run Python source in a fresh fork of the warm guest; afterwards the scratch folders are empty."""
        return await self._call({"op": "program"}, code.encode("utf-8", "surrogatepass"), self.limits)

    async def read(self, path: str) -> bytes:
        """A regular file inside, at most `disk_bytes` of it; OSError as `open` would raise it."""
        max_bytes = self.limits.disk_bytes
        request = {"op": "read", "path": path, "max_bytes": max_bytes}
        _, payload = await self._exchange(request, b"", timeout_s=START_TIMEOUT_S, max_bytes=max_bytes)
        return payload

    async def write(self, path: str, content: bytes) -> None:
        """Make or replace a file inside, its folders included; OSError as `open` would raise it."""
        await self._exchange({"op": "write", "path": path}, content, timeout_s=START_TIMEOUT_S)

    async def stop(self) -> None:
        """Kill the guest with all that runs inside and remove the place; may be called twice."""
        self._kill()
        async with self._turn:
            if self._socket is not None:
                self._socket.close()
                self._socket = None
        if self._guest_pidfd is not None:
            pidfd, self._guest_pidfd = self._guest_pidfd, None
            # Pid 1 of a namespace counts as ended only when every process in it has.
            has_ended = await asyncio.to_thread(_wait_readable, pidfd)
            os.close(pidfd)
            if not has_ended:
                raise SandboxError(f"sandbox {self.label} did not end within {ANSWER_GRACE_S:g} s of its kill")
        if self._process is not None:
            process, self._process = self._process, None
            try:
                await asyncio.to_thread(process.wait, ANSWER_GRACE_S)
            except subprocess.TimeoutExpired as error:
                raise SandboxError(f"sandbox {self.label} did not end within {ANSWER_GRACE_S:g} s of its kill") from error
            if process.stderr is not None:
                process.stderr.close()
        self._remove()

    # ------------------------------------------------------------ frames

    async def _call(self, request: dict[str, Any], payload: bytes, limits: SandboxLimits) -> CommandResult:
        request["limits"] = asdict(limits)
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            header, output = await self._exchange(request, payload, timeout_s=limits.wall_s + ANSWER_GRACE_S, max_bytes=limits.output_bytes)
        except TimeoutError:
            return CommandResult(stdout=b"", stderr=b"", exit_code=None, killed_by="wall_time", run_s=clock() - started)
        if header["is_suspect"]:
            self._kill()
        if "exit_code" not in header:
            raise SandboxError(f"the guest could not make a process: {header['message']}")
        split = header["stdout_size"]
        return CommandResult(
            stdout=output[:split],
            stderr=output[split:],
            exit_code=header["exit_code"],
            killed_by=header["killed_by"],
            dropped_output_bytes=header["dropped"],
            run_s=header["run_s"],
        )

    async def _exchange(
        self, request: dict[str, Any] | None, payload: bytes, *, timeout_s: float, max_bytes: int = 0
    ) -> tuple[dict[str, Any], bytes]:
        """Send one request (None: only wait) and receive its answer, whose payload is of about `max_bytes` at most.

        Raises:
            TimeoutError: No answer in time; the sandbox is dead.
            SandboxError: The guest is dead or broke the frames; the sandbox is dead.
            OSError: The guest says that the file operation failed.
        """
        async with self._turn:
            if not self.is_alive:
                raise SandboxError("the sandbox is not running")
            is_complete = False
            try:
                async with asyncio.timeout(timeout_s):
                    if request is not None:
                        encoded = json.dumps(request).encode()
                        await self._loop_send(FRAME.pack(len(encoded), len(payload)) + encoded + payload)
                    header_size, payload_size = FRAME.unpack(await self._receive(FRAME.size))
                    if header_size > MAX_HEADER_BYTES or payload_size > max_bytes + 65536:
                        raise SandboxError(f"the guest sent a frame of {header_size} + {payload_size} bytes")
                    header = json.loads(await self._receive(header_size))
                    answer = await self._receive(payload_size)
                is_complete = True
            except (ConnectionError, ValueError) as error:
                raise SandboxError(f"the guest broke off: {error}") from error
            finally:
                if not is_complete:
                    self._kill()
        if "errno" in header and not header["is_suspect"]:
            raise OSError(header["errno"], header["message"])
        return header, answer

    async def _loop_send(self, frame: bytes) -> None:
        assert self._socket is not None, "checked by _exchange"
        await asyncio.get_running_loop().sock_sendall(self._socket, frame)

    async def _receive(self, size: int) -> bytes:
        assert self._socket is not None, "checked by _exchange"
        parts = bytearray()
        while len(parts) < size:
            chunk = await asyncio.get_running_loop().sock_recv(self._socket, min(size - len(parts), 1 << 20))
            if not chunk:
                raise SandboxError("the guest is gone")
            parts += chunk
        return bytes(parts)

    def _kill(self) -> None:
        self._is_killed = True
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        if self._socket is not None:
            # A close would leave an exchange in progress waiting for ever; this ends it with end of file.
            with contextlib.suppress(OSError):  # the guest's end is closed already
                self._socket.shutdown(socket.SHUT_RDWR)

    def _last_words(self) -> str:
        if self._process is None:
            return "it could not be run"
        assert self._process.stderr is not None, "started with a pipe"
        self._process.wait(ANSWER_GRACE_S)
        os.set_blocking(self._process.stderr.fileno(), False)
        words = self._process.stderr.read() or b""
        return words.decode("utf-8", "replace").strip()[-2000:] or "it said nothing"


def _wait_readable(fd: int) -> bool:
    """False after ANSWER_GRACE_S. By poll, since select refuses descriptors from 1024 on, which a busy worker has."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(ANSWER_GRACE_S * 1000))
