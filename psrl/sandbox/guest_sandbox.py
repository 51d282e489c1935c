"""The host's side of one sandbox: starts its guest, exchanges frames with it, and kills it when it does not answer.

Invariant: a sandbox whose exchange did not come to its end (time, cancellation, broken frame) is dead afterwards and is never used
again. Subclasses say only how the place is made and reached.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import fields
from pathlib import Path
from typing import Any

from psrl.errors import SandboxError, SandboxUnavailableError
from psrl.protocols import Sandbox
from psrl.sandbox.link import GuestLink
from psrl.types import CommandResult, SandboxLimits, SandboxSpec

FRAME = struct.Struct("!II")
GUEST_FILES = ("guest.py", "guest_child.py", "guest_filter.py", "guest_interpreter.py", "guest_kernel.py", "guest_output.py")
START_TIMEOUT_S = 30.0
"""Generous: a machine whose cores all train still starts a Python in it."""
ANSWER_GRACE_S = 5.0
"""The guest ends a program at its wall time; a guest that is this late is itself in trouble."""
MAX_HEADER_BYTES = 65536
LABEL_VARIABLE = "PSRL_SANDBOX"
LIMITS = tuple(field.name for field in fields(SandboxLimits))


def guest_source(name: str) -> bytes:
    """The text of one of GUEST_FILES."""
    return (Path(__file__).parent / name).read_bytes()


class GuestSandbox(Sandbox):
    """A `Sandbox` that a guest process serves. One call at a time; callers beyond that wait."""

    def __init__(self, *, label: str, spec: SandboxSpec, start_slots: AbstractAsyncContextManager[Any] | None = None) -> None:
        """`label` marks what belongs to this worker (see reaper.py); the limits of `spec` are the defaults of `run`.

        `start_slots` is held while the place is made: how many of them start at once is the worker's affair.
        """
        self.label = label
        self.spec = spec
        self.limits = spec.limits
        self._start_slots = start_slots or contextlib.nullcontext()
        self._link: GuestLink | None = None
        self._is_killed = False
        self._turn = asyncio.Lock()
        self._stopping: asyncio.Task[None] | None = None

    @abstractmethod
    async def _connect(self) -> GuestLink:
        """Make the place and start the guest in it.

        Raises:
            SandboxUnavailableError: The place cannot be made here; says the fix.
            SandboxError, OSError: It could not be made this time.
        """

    async def _prepare(self) -> None:
        """Have ready what takes long and makes nothing that must be removed. Errors as `_connect`."""
        return

    async def _remove(self) -> None:
        """Remove what `_connect` made, also where it was cancelled half-way; may be called twice."""
        return

    def _has_answered(self, link: GuestLink) -> None:
        """Called once the guest is ready. OSError: it is gone already."""
        return

    @property
    def is_alive(self) -> bool:
        """Whether a call can be made."""
        return not self._is_killed and self._link is not None and self._link.is_alive

    async def start(self) -> None:
        """Start the guest and wait until it is ready; SandboxUnavailableError with its last words if it never is.

        Nothing is left of a start that fails or is cancelled.
        """
        if self.is_alive:
            return
        await self._prepare()
        async with self._start_slots:
            is_started = False
            try:
                await self._start()
                is_started = True
            finally:
                if not is_started:
                    await self.stop()

    async def _start(self) -> None:
        self._is_killed = False
        try:
            self._link = await self._connect()
        except OSError as error:
            raise self._unavailable(error, "it could not be run") from error
        try:
            header, _ = await self._exchange(None, b"", timeout_s=START_TIMEOUT_S)
            if header != {"ready": True}:
                raise SandboxError(f"the guest said {header}")
            self._has_answered(self._link)
        except (SandboxError, OSError) as error:  # TimeoutError is one
            self._kill()
            words = await self._link.last_words()
            raise self._unavailable(error, words or "it said nothing") from error

    def _unavailable(self, error: Exception, words: str) -> SandboxUnavailableError:
        return SandboxUnavailableError(f"sandbox did not start ({error}): {words}. Fix: {self._fix()}")

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

    async def run_program(
        self, code: str, *, stdin: bytes = b"", limits: SandboxLimits | None = None, shows_last: bool = True, keeps_files: bool = False
    ) -> CommandResult:
        """Run Python source in a fresh fork of the warm guest; afterwards the scratch folders are empty, unless it `keeps_files`.

        `shows_last`: print the value of a last statement that is an expression, by repr, unless it is None.
        """
        source = code.encode("utf-8", "surrogatepass")
        request = {"op": "program", "code_bytes": len(source), "shows_last": shows_last, "keeps_files": keeps_files}
        return await self._call(request, source + stdin, limits or self.limits)

    async def empty(self) -> None:
        """Remove all files that programs may have left; the sandbox is dead afterwards where that cannot be done."""
        try:
            header, _ = await self._exchange({"op": "empty"}, b"", timeout_s=START_TIMEOUT_S)
        except (SandboxError, TimeoutError):
            return
        if header["is_suspect"]:
            self._kill()

    async def read(self, path: str) -> bytes:
        """A regular file inside, at most `disk_bytes` of it; OSError as `open` would raise it."""
        max_bytes = self.limits.disk_bytes
        request = {"op": "read", "path": path, "max_bytes": max_bytes}
        return await self._file(request, b"", max_bytes=max_bytes)

    async def write(self, path: str, content: bytes) -> None:
        """Make or replace a file inside, its folders included; OSError as `open` would raise it."""
        await self._file({"op": "write", "path": path}, content)

    async def _file(self, request: dict[str, Any], content: bytes, *, max_bytes: int = 0) -> bytes:
        try:
            _, payload = await self._exchange(request, content, timeout_s=START_TIMEOUT_S, max_bytes=max_bytes)
        except TimeoutError as error:  # an OSError, but not of the file
            raise SandboxError(f"the sandbox did not {request['op']} a file within {START_TIMEOUT_S:g} s") from error
        return payload

    async def stop(self) -> None:
        """Kill the guest with all that runs inside and remove the place, also where the caller is cancelled; may be called twice."""
        self._kill()
        if self._stopping is None or self._stopping.done():
            self._stopping = asyncio.create_task(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        async with self._turn:
            link, self._link = self._link, None
        try:
            if link is not None:
                await link.end()
        finally:
            await self._remove()

    # ------------------------------------------------------------ frames

    async def _call(self, request: dict[str, Any], payload: bytes, limits: SandboxLimits) -> CommandResult:
        request["limits"] = {name: getattr(limits, name) for name in LIMITS}  # flat: `asdict` copies as deep as it goes
        clock = asyncio.get_running_loop().time
        started = clock()
        link = self._link
        try:
            header, output = await self._exchange(request, payload, timeout_s=limits.wall_s + ANSWER_GRACE_S, max_bytes=limits.output_bytes)
        except TimeoutError as error:
            if link is not None and not await link.is_there():
                raise SandboxError(f"no answer within {ANSWER_GRACE_S:g} s of the wall time, and the place is gone") from error
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
            link = self._link
            if link is None or not self.is_alive:
                raise SandboxError("the sandbox is not running")
            is_complete = False
            try:
                async with asyncio.timeout(timeout_s):
                    if request is not None:
                        await link.send(frame_of(request, payload))
                    header_size, payload_size = FRAME.unpack(await link.receive(FRAME.size))
                    if header_size > MAX_HEADER_BYTES or payload_size > max_bytes + 65536:
                        raise SandboxError(f"the guest sent a frame of {header_size} + {payload_size} bytes")
                    header = json.loads(await link.receive(header_size))
                    answer = await link.receive(payload_size)
                is_complete = True
            except (ConnectionError, ValueError) as error:
                raise SandboxError(f"the guest broke off: {error}") from error
            finally:
                if not is_complete:
                    self._kill()
        if "errno" in header and not header["is_suspect"]:
            raise OSError(header["errno"], header["message"])
        return header, answer

    def _kill(self) -> None:
        self._is_killed = True
        if self._link is not None:
            self._link.cut()


def frame_of(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """One message to the guest."""
    encoded = json.dumps(header).encode()
    return FRAME.pack(len(encoded), len(payload)) + encoded + payload
