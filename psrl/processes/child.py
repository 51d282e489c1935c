"""A server as a child process: started, watched, stopped.

Invariant: the child gets a socket that the parent has bound, so its port cannot be taken by another; it ends with its parent.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp

from psrl.errors import ProcessDiedError

POLL_S = 0.05
HEALTH_TIMEOUT_S = 2.0
STOP_GRACE_S = 5.0
KILL_WAIT_S = 5.0
"""A process that was killed is gone as soon as the kernel has freed its memory."""
HEALTH_LOOK_S = 1.0
SILENT_AFTER_S = 20.0
"""A server that answers no `/health` for so long is taken as lost; on a busy machine a live one takes some seconds."""
PORT_WAIT_S = 10.0
"""Of a server that takes the port of one whose parent was killed: such a one looks for its parent twice a second, and ends."""
LAST_WORDS_BYTES = 4000


class ChildProcess:
    """One server with `/health`. An object is started once; to start the server again on its port, make another with `port`.

    Example:
        `ChildProcess("engine 0", [sys.executable, "-m", "psrl.engines.torch", "--model-path", path], log_path=folder / "engine.log")`;
        `--fd` and `--parent-pid` are added.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        *,
        log_path: Path,
        env: dict[str, str] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        port_wait_s: float = 0.0,
    ) -> None:
        """`name` is what errors call it; port 0 takes a free one; `env` replaces the child's environment, None passes the parent's on.

        `port_wait_s`: how long a port that is taken is waited for, because its last owner is on its way out.
        """
        self.name = name
        self.log_path = log_path
        self.url = ""
        self.port = port
        self._argv, self._env, self._host, self._port_wait_s = list(argv), env, host, port_wait_s
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self, timeout_s: float) -> None:
        """Spawn and wait until `/health` answers 200.

        Raises:
            ProcessDiedError: It could not be spawned, ended, or was not ready in time (then it is stopped); with its last words.
        """
        with await self._bound() as listener:
            self._spawn(listener)
        deadline = asyncio.get_running_loop().time() + timeout_s
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)) as http:
            while True:
                if (code := self.poll()) is not None:
                    raise ProcessDiedError(f"{self.name} ended with {code} at its start; last words: {self.last_words()}")
                if await _is_healthy(http, self.url):
                    return
                if asyncio.get_running_loop().time() > deadline:
                    await asyncio.to_thread(self.stop)
                    raise ProcessDiedError(f"{self.name} is not ready after {timeout_s:.0f} s; last words: {self.last_words()}")
                await asyncio.sleep(POLL_S)

    async def ended(self) -> int:
        """The exit code, once there is one."""
        while (code := self.poll()) is None:  # noqa: ASYNC110 - a child process has no event to wait for
            await asyncio.sleep(POLL_S)
        return code

    async def lost(self, *, silent_after_s: float = SILENT_AFTER_S) -> str:
        """Why it cannot be used any more, once that is so: it ended, or it answers no `/health` for `silent_after_s`.

        Waits for: its end, its answers once a second. Unblocked by: either, or the limit.
        """
        loop = asyncio.get_running_loop()
        heard_at, look_at = loop.time(), 0.0
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)) as http:
            while (code := self.poll()) is None:
                if loop.time() >= look_at:
                    if await _is_healthy(http, self.url):
                        heard_at = loop.time()
                    elif loop.time() - heard_at > silent_after_s:
                        return f"{self.name} answers no /health for {silent_after_s:g} s; last words: {self.last_words()}"
                    look_at = loop.time() + HEALTH_LOOK_S
                await asyncio.sleep(POLL_S)
        return f"{self.name} ended with code {code}; last words: {self.last_words()}"

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.poll()

    @property
    def pid(self) -> int:
        """Of the child, which leads its own process group."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    def last_words(self) -> str:
        """The end of its log."""
        if not self.log_path.exists():
            return "(no log)"
        with open(self.log_path, "rb") as file:
            file.seek(max(0, self.log_path.stat().st_size - LAST_WORDS_BYTES))
            return file.read().decode(errors="replace").strip() or "(nothing)"

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """TERM, then KILL after `grace_s`, to the whole process group; may be called twice, and without a start."""
        if self._process is None:
            return
        for signal_number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_WAIT_S)):
            try:
                os.killpg(self._process.pid, signal_number)
            except ProcessLookupError:
                break
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
        self._process.wait(KILL_WAIT_S)

    async def _bound(self) -> socket.socket:
        deadline = asyncio.get_running_loop().time() + self._port_wait_s
        while True:
            listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((self._host, self.port))
            except OSError as error:
                listener.close()
                if asyncio.get_running_loop().time() >= deadline:
                    raise ProcessDiedError(f"{self.name} cannot listen on {self._host}:{self.port}: {error}") from error
                await asyncio.sleep(POLL_S)
            else:
                return listener

    def _spawn(self, listener: socket.socket) -> None:
        assert self._process is None, f"{self.name} was started before"
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.port = listener.getsockname()[1]
        self.url = f"http://{self._host}:{self.port}"
        argv = [*self._argv, "--fd", str(listener.fileno()), "--parent-pid", str(os.getpid())]
        with open(self.log_path, "ab") as log:
            try:
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._env,
                    pass_fds=(listener.fileno(),),
                    start_new_session=True,
                )
            except OSError as error:
                raise ProcessDiedError(f"{self.name}: {argv[0]} cannot be run: {error}") from error


def free_port(host: str = "127.0.0.1") -> int:
    """A port for a program that takes no socket; another could take it first, which such a program then says."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


async def _is_healthy(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/health") as answer:
            return answer.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
