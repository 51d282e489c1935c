"""A guest that is a child process of this one: a socket pair to talk to it, the kernel to end it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
from abc import abstractmethod
from dataclasses import dataclass

from psrl.errors import SandboxError
from psrl.sandbox.guest_sandbox import GuestSandbox
from psrl.sandbox.link import GuestLink

END_WITHIN_S = 5.0
"""The kernel ends what was killed at once, unless the machine is in trouble."""
LAST_WORDS = 2000
MAX_RECEIVED = 1 << 16
"""At once: most answers come whole."""


def load_guest(folder: str) -> str:
    """Python that loads the guest from `folder` and runs it: not as a script, whose syntax tree stays in memory while it runs."""
    return f"import sys; sys.path[0] = {folder!r}; import guest; guest.main(sys.argv[1:])"


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


class LocalGuest(GuestLink):
    """See the module. Descriptor 0 and 1 of the guest are its end of the socket pair."""

    def __init__(self, command: GuestCommand, *, label: str) -> None:
        """Start it, on the caller's thread, since the kernel ends the child when its parent thread ends. OSError: it cannot be run."""
        self._label = label
        self._guest_pid_fd = command.guest_pid_fd
        self._guest_pidfd: int | None = None
        ours, theirs = socket.socketpair()
        is_started = False
        try:
            self._process = subprocess.Popen(
                command.argv,
                env=command.env,
                cwd=command.cwd,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.PIPE,
                pass_fds=command.pass_fds,
                user=command.user,
                group=command.user,
                extra_groups=None if command.user is None else (),
            )
            is_started = True
        finally:
            theirs.close()
            for fd in command.pass_fds:
                os.close(fd)
            if not is_started:
                ours.close()
                self._close_pid_fd()
        ours.setblocking(False)
        self._socket: socket.socket | None = ours
        self._received = bytearray()

    def watch(self) -> None:
        """Learn the pid of a guest that has answered, to wait for its end."""
        pid = self._process.pid
        if self._guest_pid_fd is not None:
            pid = json.loads(os.read(self._guest_pid_fd, 4096))["child-pid"]
            self._close_pid_fd()
        self._guest_pidfd = os.pidfd_open(pid)

    @property
    def is_alive(self) -> bool:
        """Whether the child has not ended."""
        return self._process.poll() is None

    async def send(self, data: bytes) -> None:
        """See `GuestLink`."""
        assert self._socket is not None, "not used after end"
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def receive(self, size: int) -> bytes:
        """See `GuestLink`."""
        assert self._socket is not None, "not used after end"
        received = self._received
        while len(received) < size:
            chunk = await asyncio.get_running_loop().sock_recv(self._socket, MAX_RECEIVED)
            if not chunk:
                raise ConnectionError("the guest is gone")
            received += chunk
        taken = bytes(received[:size])
        del received[:size]
        return taken

    def cut(self) -> None:
        """Kill the child."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        if self._socket is not None:
            # A close would leave an exchange in progress waiting for ever; this ends it with end of file.
            with contextlib.suppress(OSError):  # the guest's end is closed already
                self._socket.shutdown(socket.SHUT_RDWR)

    async def last_words(self) -> str:
        """See `GuestLink`."""
        return await asyncio.to_thread(self._stderr)

    def _stderr(self) -> str:
        assert self._process.stderr is not None, "started with a pipe"
        self._process.wait(END_WITHIN_S)
        os.set_blocking(self._process.stderr.fileno(), False)
        words = self._process.stderr.read() or b""
        return words.decode("utf-8", "replace").strip()[-LAST_WORDS:]

    async def end(self) -> None:
        """See `GuestLink`."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._close_pid_fd()
        late = SandboxError(f"sandbox {self._label} did not end within {END_WITHIN_S:g} s of its kill")
        if self._guest_pidfd is not None:
            pidfd, self._guest_pidfd = self._guest_pidfd, None
            # Pid 1 of a namespace counts as ended only when every process in it has.
            has_ended = await asyncio.to_thread(_wait_readable, pidfd)
            os.close(pidfd)
            if not has_ended:
                raise late
        try:
            await asyncio.to_thread(self._process.wait, END_WITHIN_S)
        except subprocess.TimeoutExpired as error:
            raise late from error
        assert self._process.stderr is not None, "started with a pipe"
        self._process.stderr.close()

    def _close_pid_fd(self) -> None:
        if self._guest_pid_fd is not None:
            os.close(self._guest_pid_fd)
            self._guest_pid_fd = None


class LocalGuestSandbox(GuestSandbox):
    """A sandbox whose guest is a child process. Subclasses say only which command makes the place."""

    @abstractmethod
    def _command(self) -> GuestCommand:
        """Make what the guest needs and say how to start it."""

    async def _connect(self) -> LocalGuest:
        return LocalGuest(self._command(), label=self.label)

    def _has_answered(self, link: GuestLink) -> None:
        assert isinstance(link, LocalGuest), "made by _connect"
        link.watch()


def _wait_readable(fd: int) -> bool:
    """False after END_WITHIN_S. By poll, since select refuses descriptors from 1024 on, which a busy worker has."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(END_WITHIN_S * 1000))
