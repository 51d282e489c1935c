"""Programs run by SandboxFusion services (bytedance/SandboxFusion, or `psrl serve sandbox`), as the `ProgramRunner` of a run.

Such a service runs whole programs and keeps nothing: it is no `Sandbox`, and serves the code interpreter only. What a program shows is
the same as everywhere: the service is sent psrl's own interpreter (`guest_interpreter.py`, standard library) with the program as its text.

Invariant: a result is of the program that was asked for, run to its end once. What the world got wrong (no answer, a full queue, a broken
sandbox) is tried again, elsewhere where there is an elsewhere, until `sandbox.max_queue_s` is used up, and then is a SandboxError;
what the program got wrong never is.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from psrl.config.sandbox import SandboxConfig, service_urls_of
from psrl.errors import ConfigError, SandboxError, SandboxUnavailableError
from psrl.protocols import ProgramRunner
from psrl.sandbox.backend import SandboxBackend
from psrl.sandbox.guest_sandbox import GuestSandbox, guest_source
from psrl.telemetry.waits import waiting
from psrl.types import CommandResult, SandboxSpec

CONNECT_TIMEOUT_S = 5.0
ANSWER_GRACE_S = 15.0
"""The service ends a program at its wall time; one that is this late does not answer at all."""
REST_S = 2.0
"""A service that failed is asked last for so long."""
PAUSE_S = (0.05, 1.0)
"""Between two tries: the first pause, doubled each time up to the last; a random half of it is left out."""
MAX_BROKEN_TRIES = 4
"""Times that a service may say that its sandbox broke, for one program."""
BUSY = 429
REFUSED = {
    401: "wants another key; set sandbox.api_key_file to the file with its key",
    403: "wants another key; set sandbox.api_key_file to the file with its key",
    404: "has no /run_code; correct sandbox.urls",
    405: "has no /run_code; correct sandbox.urls",
    413: "takes no program of this size",
    422: "does not take psrl's request; is it a SandboxFusion service?",
}
"""Answers that another try would not change."""
SLACK = 64
"""What is already cut holds a line that says so."""
INTERPRETER = """\
import os
names = {{"__name__": "interpreter"}}
exec(compile({source}, "<interpreter>", "exec"), names)
names["prepare"]()
os._exit(names["run_program"]({code}))
"""


class SandboxFusionBackend(SandboxBackend):
    """Its programs are run by `SandboxFusionInterpreter`; places that last are not to be had."""

    def __init__(self, settings: SandboxConfig) -> None:
        """ConfigError: no service is named, or not by an address."""
        self._urls = service_urls_of(settings)

    def make(self, *, label: str, spec: SandboxSpec, start_slots: AbstractAsyncContextManager[Any]) -> GuestSandbox:
        """ConfigError: always."""
        raise no_places_error("a sandbox whose files stay between commands is asked for")


def no_places_error(what_for: str) -> ConfigError:
    """A SandboxFusion service cannot be what is needed."""
    rule = f"runs whole programs and keeps nothing, and {what_for}"
    return ConfigError(key="sandbox.backend", value="sandbox_fusion", rule=rule, fix="set sandbox.backend=bubblewrap or docker")


@dataclass(kw_only=True, slots=True)
class _Service:
    """One URL, and how it does."""

    url: str
    num_in_flight: int = 0
    rests_until_s: float = 0.0


class _TryAgainError(Exception):
    """The world got it wrong; `pause_s`: not before then."""

    def __init__(self, cause: str, *, pause_s: float = 0.0, is_broken: bool = False) -> None:
        super().__init__(cause)
        self.pause_s = pause_s
        self.is_broken = is_broken


class SandboxFusionInterpreter(ProgramRunner):
    """Runs up to `sandbox.num_workers` programs at once, each where fewest of its own run; further callers wait in order."""

    def __init__(self, settings: SandboxConfig) -> None:
        """ConfigError: no service is named, not by an address, or there is no key in its file."""
        self._settings = settings
        self._services = [_Service(url=url) for url in service_urls_of(settings)]
        self._interpreter = ascii(guest_source("guest_interpreter.py").decode())
        self._headers = {"content-type": "application/json", **_key_header(settings.api_key_file)}
        self._places = asyncio.Semaphore(settings.num_workers)
        self._session: aiohttp.ClientSession | None = None
        self._calls: set[asyncio.Task[CommandResult]] = set()

    async def start(self) -> None:
        """Open the connections' pool; a second call does nothing."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    async def preflight(self) -> None:
        """Run `print(2+3)` at every service; SandboxUnavailableError with the service and what came instead of 5."""
        await self.start()
        for service in self._services:
            result = await self._until_answered("print(2+3)", [service])
            if result.exit_code != 0 or result.stdout != b"5\n":
                raise SandboxUnavailableError(
                    f"print(2+3) must print 5 but {service.url} gave {result.stdout!r}, {result.stderr!r}, exit code {result.exit_code}, "
                    f"killed by {result.killed_by}. Fix: raise sandbox.wall_s and sandbox.memory_mb, and look at that service"
                )

    async def run_program(self, code: str) -> CommandResult:
        """Run one program to its end at a service.

        Consumes a place; waits for one while `num_workers` programs run, each of which has an end, then for the service; unblocked by
        its answer, by the deadline (`sandbox.max_queue_s` and the program's own time), or by `stop`.
        """
        await self.start()
        asked = asyncio.get_running_loop().time()
        call = asyncio.create_task(self._run(code, asked))
        self._calls.add(call)
        try:
            await asyncio.wait({call})
        finally:
            self._calls.discard(call)
            if not call.done():
                call.cancel()
        if call.cancelled():
            raise SandboxError("the interpreter has been stopped")
        return call.result()

    async def stop(self) -> None:
        """Refuse who still waits, close the connections; may be called twice, and started again after."""
        for call in self._calls:
            call.cancel()
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _run(self, code: str, asked: float) -> CommandResult:
        with waiting():
            await self._places.acquire()
        try:
            result = await self._until_answered(code, self._services)
        finally:
            self._places.release()
        total_s = asyncio.get_running_loop().time() - asked
        return replace(result, queue_s=max(0.0, total_s - result.run_s))

    async def _until_answered(self, code: str, services: list[_Service]) -> CommandResult:
        body = self._body(code)
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._settings.max_queue_s
        pause_s, num_broken = PAUSE_S[0], 0
        while True:
            now = clock()
            service = min(services, key=lambda each: (each.rests_until_s > now, each.num_in_flight))
            try:
                return await self._ask(service, body, patience_s=deadline - now)
            except _TryAgainError as error:
                num_broken += error.is_broken
                wait_s = max(error.pause_s, pause_s * (1 - random.random() / 2))
                if clock() + wait_s >= deadline or num_broken >= MAX_BROKEN_TRIES:
                    places = " and ".join(each.url for each in services)
                    raise SandboxError(f"no program could be run at {places} within {self._settings.max_queue_s:g} s: {error}") from error
                with waiting():
                    await asyncio.sleep(wait_s)
                pause_s = min(2 * pause_s, PAUSE_S[1])

    async def _ask(self, service: _Service, body: bytes, *, patience_s: float) -> CommandResult:
        """One try. It may wait in the service's queue for `patience_s`, and then run for its wall time."""
        assert self._session is not None, "started before"
        total_s = max(patience_s, 0.0) + self._settings.wall_s + ANSWER_GRACE_S
        timeout = aiohttp.ClientTimeout(total=total_s, connect=CONNECT_TIMEOUT_S)
        service.num_in_flight += 1
        try:
            async with self._session.post(f"{service.url}/run_code", data=body, headers=self._headers, timeout=timeout) as answer:
                status, content, retry_after = answer.status, await answer.read(), answer.headers.get("retry-after", "")
        except (aiohttp.ClientError, TimeoutError) as error:
            self._rest(service)
            raise _TryAgainError(f"{service.url}: {type(error).__name__} {error}".strip()) from error
        finally:
            service.num_in_flight -= 1
        if status == BUSY:
            raise _TryAgainError(f"{service.url} is busy: {_said(content)}", pause_s=float(retry_after) if retry_after.isdecimal() else 0.0)
        if status in REFUSED:
            raise SandboxUnavailableError(f"{service.url} answered {status}: {_said(content)}. Fix: it {REFUSED[status]}")
        if status != 200:
            self._rest(service)
            raise _TryAgainError(f"{service.url} answered {status}: {_said(content)}")
        try:
            return result_of(orjson.loads(content), max_bytes=self._settings.output_kb * 1024)
        except SandboxError as error:
            raise _TryAgainError(f"{service.url}: {error}", is_broken=True) from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _TryAgainError(f"{service.url} answered no result of a program: {_said(content)}", is_broken=True) from error

    def _rest(self, service: _Service) -> None:
        service.rests_until_s = asyncio.get_running_loop().time() + REST_S

    def _body(self, code: str) -> bytes:
        program = INTERPRETER.format(source=self._interpreter, code=ascii(code))
        return orjson.dumps(
            {
                "code": program,
                "language": "python",
                "compile_timeout": self._settings.wall_s,
                "run_timeout": self._settings.wall_s,
                "memory_limit_MB": self._settings.memory_mb,
                "stdin": "",
                "files": {},
                "fetch_files": [],
            }
        )


def result_of(answer: dict[str, Any], *, max_bytes: int) -> CommandResult:
    """A response to `run_code`, as everywhere else in psrl. Three quarters of `max_bytes` are for stdout.

    Raises:
        SandboxError: The service says that its sandbox failed.
        KeyError, TypeError, ValueError, AttributeError: It is no such response.

    Example:
        `Failed` with `run_result.status` `TimeLimitExceeded` -> killed_by `wall_time`; `return_code` -9 -> killed_by `signal:9`,
        unless the service says better (`psrl serve sandbox` does).
    """
    ran = answer["run_result"]
    if answer["status"] == "SandboxError" or ran is None or ran["status"] == "Error":
        raise SandboxError(f"its sandbox failed: {answer['message'] or (ran or {}).get('stderr')}")
    return_code = ran["return_code"]
    killed_by = ran.get("killed_by")
    if killed_by is None and ran["status"] == "TimeLimitExceeded":
        killed_by = "wall_time"
    elif killed_by is None and return_code < 0:
        killed_by = f"signal:{-return_code}"
    stdout, num_out = _bounded(ran["stdout"] or "", max_bytes - max_bytes // 4)
    stderr, num_err = _bounded(ran["stderr"] or "", max_bytes // 4)
    return CommandResult(
        stdout=stdout,
        stderr=stderr,
        exit_code=return_code if killed_by is None else None,
        killed_by=killed_by,
        dropped_output_bytes=num_out + num_err + int(ran.get("dropped_output_bytes") or 0),
        run_s=float(ran["execution_time"] or 0.0),
    )


def _bounded(text: str, cap: int) -> tuple[bytes, int]:
    """Head and tail of what was printed, as `guest_output.Collector` keeps them where psrl runs the program; and the bytes between."""
    written = text.encode("utf-8", "replace")
    if len(written) <= cap + SLACK:
        return written, 0
    dropped = len(written) - cap
    head = cap // 2
    return written[:head] + b"\n[... %d bytes dropped ...]\n" % dropped + written[len(written) - (cap - head) :], dropped


def _said(content: bytes) -> str:
    return content[:300].decode("utf-8", "replace")


def _key_header(api_key_file: str | None) -> dict[str, str]:
    if api_key_file is None:
        return {}
    path = Path(api_key_file)
    key = path.read_text().strip() if path.is_file() else ""
    if not key:
        raise ConfigError(key="sandbox.api_key_file", value=api_key_file, rule="holds no key", fix="name the file with the service's key")
    return {"authorization": f"Bearer {key}"}
