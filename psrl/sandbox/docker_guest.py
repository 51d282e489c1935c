"""A guest that is pid 1 of a container: the Engine starts and removes it, the attached stream carries the frames.

The guest's own source goes in over the same stream, so nothing is put into the image. The stream from the container comes in blocks
of the Engine: a byte that says which output (1 stdout, 2 stderr), three zeros, the size as a big-endian uint32, the bytes.
When the stream's other end closes, also because this process died, the Engine closes the guest's stdin; the guest then ends, and the Engine
removes the container by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import socket
import struct
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from psrl.errors import SandboxError
from psrl.sandbox.docker_engine import DockerEngine, EngineRefusal
from psrl.sandbox.guest_sandbox import GUEST_FILES, guest_source
from psrl.sandbox.link import GuestLink

if TYPE_CHECKING:
    from docker import APIClient

BLOCK = struct.Struct("!BxxxI")
STDOUT, STDERR = 1, 2
MAX_WORDS = 2000
STATE_WITHIN_S = 5.0
"""An Engine that needs longer to say how one container is does not carry its output either."""
GONE, BUSY = 404, 409
PYTHONS = ("python3", "/usr/bin/python3", "/usr/local/bin/python3", "/opt/miniconda3/bin/python", "/opt/conda/bin/python", "python")
NO_PYTHON = "no Python 3.9 or newer found in the image; looked for"
FIND_PYTHON = """
for python in "$@"; do
  if "$python" -I -c 'import sys; sys.exit(sys.version_info < (3, 9))' 2>/dev/null; then
    exec "$python" -I -B -c "$0" container ARGUMENTS
  fi
done
echo "NO_PYTHON $*" >&2
exit 96
"""
BOOT_BYTES = 1024
LOAD_BOOT = f"import os;exec(b''.join(os.read(0,1)for _ in range({BOOT_BYTES})))"
"""Short, since it stays in the guest's command line, which programs list."""
BOOT = """
import os, sys, types
def take(size):
    parts = b""
    while len(parts) < size:
        chunk = os.read(0, size - len(parts))
        if not chunk:
            sys.exit(0)
        parts += chunk
    return parts
arguments = sys.argv[1:]
for count in range(int(take(8))):
    name, source = take(32).decode().strip(), take(int(take(8))).decode()
    sys.modules[name] = module = types.ModuleType(name)
    exec(compile(source, "<" + name + ">", "exec"), module.__dict__)
module.main(arguments)
"""


def guest_argv(work: str, scratch: tuple[str, ...]) -> list[str]:
    """What a container runs, by `/bin/sh`: the first Python that is new enough, which loads the guest from its stdin."""
    script = FIND_PYTHON.replace("ARGUMENTS", " ".join(map(shlex.quote, (work, *scratch)))).replace("NO_PYTHON", NO_PYTHON)
    return ["/bin/sh", "-c", script, LOAD_BOOT, *PYTHONS]


def guest_bundle() -> bytes:
    """BOOT, and what it reads: the number of modules, then name, size and source of each; the guest comes last."""
    sources = [(name.removesuffix(".py"), guest_source(name)) for name in sorted(GUEST_FILES, reverse=True)]
    parts = [BOOT.encode().ljust(BOOT_BYTES), b"%8d" % len(sources)]
    for name, source in sources:
        parts += [name.encode().ljust(32), b"%8d" % len(source), source]
    return b"".join(parts)


def started(client: APIClient, options: dict[str, Any]) -> socket.socket:
    """Create the container, attach to it, start it; the stream. Blocks: for a thread."""
    name = options["name"]
    client.create_container(**options)
    # As the SDK's `attach_socket`, whose connection stays open until the garbage collector finds it.
    with client.post(
        f"{client.base_url}/v{client.api_version}/containers/{name}/attach",
        params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1},
        headers={"Connection": "Upgrade", "Upgrade": "tcp"},
        stream=True,
        timeout=client.timeout,
    ) as answer:
        if answer.status_code not in (HTTPStatus.SWITCHING_PROTOCOLS, HTTPStatus.OK):
            raise EngineRefusal(f"the Docker Engine did not attach to {name}: {answer.text[:MAX_WORDS]}", status=answer.status_code)
        stream = socket.socket(fileno=os.dup(answer.raw.fileno()))
    is_started = False
    try:
        client.start(name)
        is_started = True
    finally:
        if not is_started:
            stream.close()
    stream.setblocking(False)
    return stream


class ContainerGuest(GuestLink):
    """See the module."""

    def __init__(self, engine: DockerEngine, name: str, stream: socket.socket) -> None:
        """`stream` is attached to the container `name`, which has been started."""
        self._engine = engine
        self._name = name
        self._stream = stream
        self._sending = asyncio.Lock()
        self._raw = bytearray()
        self._stdout = bytearray()
        self._stderr = bytearray()
        self._is_closed = False

    @property
    def is_alive(self) -> bool:
        """Whether the stream is open: asked of the kernel, not of the Engine."""
        if self._is_closed:
            return False
        try:
            return bool(self._stream.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    async def send(self, data: bytes) -> None:
        """See `GuestLink`; what two callers send is never mixed."""
        async with self._sending:
            await asyncio.get_running_loop().sock_sendall(self._stream, data)

    async def receive(self, size: int) -> bytes:
        """See `GuestLink`."""
        while len(self._stdout) < size:
            await self._read_block()
        taken = bytes(self._stdout[:size])
        del self._stdout[:size]
        return taken

    async def _read_block(self) -> None:
        kind, size = BLOCK.unpack(await self._read(BLOCK.size))
        if kind not in (STDOUT, STDERR):
            raise ConnectionError(f"the Engine sent a block of kind {kind}")
        content = await self._read(size)
        if kind == STDOUT:
            self._stdout += content
        else:
            self._stderr = (self._stderr + content)[-MAX_WORDS:]

    async def _read(self, size: int) -> bytes:
        while len(self._raw) < size:
            chunk = await asyncio.get_running_loop().sock_recv(self._stream, 1 << 18)
            if not chunk:
                raise ConnectionError("the container is gone")
            self._raw += chunk
        taken = bytes(self._raw[:size])
        del self._raw[:size]
        return taken

    def cut(self) -> None:
        """Close the stream, at whose end the guest ends itself; `end` does not rely on it."""
        if not self._is_closed:
            with contextlib.suppress(OSError):  # the other end is closed already
                self._stream.shutdown(socket.SHUT_RDWR)

    async def last_words(self) -> str:
        """See `GuestLink`."""
        return self._stderr.decode("utf-8", "replace").strip()

    async def end(self) -> None:
        """Remove the container with all that runs in it."""
        if not self._is_closed:
            self._is_closed = True
            self._stream.close()
        await removed(self._engine, self._name)

    async def is_there(self) -> bool:
        """See `GuestLink`."""
        try:
            async with asyncio.timeout(STATE_WITHIN_S):
                state = await self._engine.ask("say how a container is", lambda client: client.inspect_container(self._name))
        except (SandboxError, TimeoutError):
            return False
        return bool(state["State"]["Running"])


async def removed(engine: DockerEngine, name: str) -> None:
    """Remove a container, whatever runs in it; returns when it is gone, also where it never was.

    Raises:
        SandboxError: The Engine does not answer, or cannot remove it.
    """

    def remove(client: APIClient) -> None:
        client.remove_container(name, force=True, v=True)

    def wait(client: APIClient) -> None:
        client.wait(name, condition="removed")

    try:
        await engine.ask(f"remove the container {name}", remove)
    except EngineRefusal as refusal:
        if refusal.status == GONE:
            return
        if refusal.status != BUSY:
            raise
        try:  # it is being removed because the guest ended
            await engine.ask(f"remove the container {name}", wait)
        except EngineRefusal as late:
            if late.status != GONE:
                raise
