"""The service: a bounded number of programs runs at once, a bounded number waits, everybody else is told so at once.

Invariant: whoever is let in is answered, by its own program's result or by the reason why there is none. Limits are those of the
sandboxes, which hold them from outside; a request can only lower them.

| route | answers |
|---|---|
| POST /run_code | how the program ended; 429: too many wait, 422: a wrong body, 413: one too large, 408: one too late, 401: a wrong key |
| GET /v1/ping | "pong" |
| GET /health | 200: places, running, waiting |
| GET /metrics | counters, in Prometheus' text form |
"""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from psrl.errors import PsrlError, SandboxError
from psrl.sandbox.guest_sandbox import GuestSandbox
from psrl.sandbox.interpreter import PythonInterpreter
from psrl.sandbox_server.bodies import RunCodeRequest, answer_of, sandbox_error
from psrl.types import CommandResult, SandboxLimits

MAX_BODY_BYTES = 16 * 2**20
RETRY_AFTER_S = 1
PATIENCE_S = 0.5
"""A client that waited longer is asked whether it is still there, before its program runs."""
CLIENT_IS_GONE = 499
"""nginx's number, for the counters: nobody reads the answer."""
SCRIPT = ".psrl-script.sh"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """How much is taken in."""

    num_workers: int
    """Programs that run at once."""
    max_queue: int
    """Requests that wait beside them."""
    max_queue_s: float
    """Longest wait for a place."""


class RefusedError(PsrlError):
    """A request that is not served: `status` is HTTP's."""

    def __init__(self, status: int, detail: Any) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


class SandboxServer:
    """See the module. `pool` has `limits.num_workers` sandboxes; whoever made it starts and stops it."""

    def __init__(self, pool: PythonInterpreter, *, limits: ServerLimits, most: SandboxLimits, api_key: str | None, name: str) -> None:
        """`most`: what a program may use; `name`: what answers call this server; no `api_key`: everybody is served."""
        self._pool = pool
        self._limits = limits
        self._most = most
        self._api_key = api_key
        self._name = name
        self._num_in = 0
        self._num_running = 0
        self._counts: defaultdict[str, float] = defaultdict(float)

    def app(self) -> Starlette:
        """The routes."""
        return Starlette(
            routes=[
                Route("/run_code", self._run_code, methods=["POST"]),
                Route("/v1/ping", self._ping),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ]
        )

    async def _run_code(self, http: Request) -> Response:
        began = time.monotonic()
        try:
            self._check_key(http)
            with self._place():
                status, answer = 200, await self._answer(_parsed(await _body(http, within_s=self._limits.max_queue_s)), http)
        except RefusedError as refused:
            status, answer = refused.status, {"detail": refused.detail}
        except ClientDisconnect:
            status, answer = CLIENT_IS_GONE, {"detail": "the client is gone"}
        self._counts[f'requests_total{{status="{status}"}}'] += 1
        self._counts["seconds_total"] += time.monotonic() - began
        headers = {"retry-after": str(RETRY_AFTER_S)} if status == 429 else None
        return Response(orjson.dumps(answer), status_code=status, media_type="application/json", headers=headers)

    async def _answer(self, request: RunCodeRequest, http: Request) -> dict[str, Any]:
        """Consumes a sandbox; waits for one that is free, at most `max_queue_s`; unblocked by a program that ends, or by that limit."""
        limits = self._limits
        patience = asyncio.timeout(limits.max_queue_s)
        run = _Run(request, most=self._most, is_wanted=lambda: _is_there(http), begun=lambda: self._begun(patience))
        try:
            async with patience:
                result = await self._pool.use(run)
        except TimeoutError as error:
            raise RefusedError(429, f"no place became free within {limits.max_queue_s:g} s: try again, or elsewhere") from error
        except SandboxError as error:
            self._counts["sandbox_errors_total"] += 1
            return sandbox_error(str(error), served_by=self._name)
        finally:
            self._num_running -= run.has_begun
        self._counts[f'programs_total{{ended="{result.killed_by or "itself"}"}}'] += 1
        self._counts["run_seconds_total"] += result.run_s
        self._counts["queue_seconds_total"] += result.queue_s
        return answer_of(result, fetched=run.fetched, served_by=self._name)

    @contextmanager
    def _place(self) -> Iterator[None]:
        """One of those who run or wait; taken before a body is read, so that only so many bodies are held.

        Raises:
            RefusedError: There is none.
        """
        limits = self._limits
        if self._num_in >= limits.num_workers + limits.max_queue:
            raise RefusedError(
                429, f"{limits.num_workers} programs run and {limits.max_queue} wait, as many as may: try again, or elsewhere"
            )
        self._num_in += 1
        try:
            yield
        finally:
            self._num_in -= 1

    def _begun(self, patience: asyncio.Timeout) -> None:
        patience.reschedule(None)
        self._num_running += 1

    def _check_key(self, http: Request) -> None:
        if self._api_key is None:
            return
        given = http.headers.get("authorization", "").removeprefix("Bearer ") or http.headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode(), self._api_key.encode()):
            raise RefusedError(401, "this server needs its API key, as `Authorization: Bearer KEY` or `x-api-key: KEY`")

    async def _ping(self, _: Request) -> Response:
        return Response(b'"pong"', media_type="application/json")

    async def _health(self, _: Request) -> Response:
        figures = {"num_workers": self._limits.num_workers, "running": self._num_running, "waiting": self._num_in - self._num_running}
        return Response(orjson.dumps({"status": "ok", **figures}), media_type="application/json")

    async def _metrics(self, _: Request) -> Response:
        samples = {"running": self._num_running, "waiting": self._num_in - self._num_running, **self._counts}
        return PlainTextResponse("".join(f"psrl_sandbox_{name} {value}\n" for name, value in samples.items()))


class _Run:
    """One request, as the work of a pool: a call runs it in the sandbox that is given. It may be called again with another."""

    def __init__(
        self, request: RunCodeRequest, *, most: SandboxLimits, is_wanted: Callable[[], Awaitable[bool]], begun: Callable[[], None]
    ) -> None:
        self._request = request
        self._is_wanted = is_wanted
        self._begun = begun
        self._made_at = time.monotonic()
        memory_bytes = most.memory_bytes
        if request.memory_limit_MB > 0:
            memory_bytes = min(memory_bytes, request.memory_limit_MB * 2**20)
        self._limits = dataclasses.replace(most, wall_s=min(most.wall_s, request.run_timeout), memory_bytes=memory_bytes)
        self.has_begun = False
        self.fetched: dict[str, bytes] = {}

    async def __call__(self, sandbox: GuestSandbox) -> CommandResult:
        if not self.has_begun:
            self.has_begun = True
            self._begun()
        has_waited = time.monotonic() - self._made_at > PATIENCE_S
        if has_waited and not await self._is_wanted():
            raise RefusedError(CLIENT_IS_GONE, "the client is gone")
        request = self._request
        stdin = (request.stdin or "").encode("utf-8", "surrogatepass")
        if request.language == "python" and not request.files and not request.fetch_files:
            return await sandbox.run_program(request.code, stdin=stdin, limits=self._limits, shows_last=False)
        try:
            return await self._with_files(sandbox, stdin)
        finally:
            if sandbox.is_alive:
                await sandbox.empty()

    async def _with_files(self, sandbox: GuestSandbox, stdin: bytes) -> CommandResult:
        request = self._request
        try:
            for path, content in request.contents().items():
                await sandbox.write(path, content)
            if request.language == "bash":
                await sandbox.write(SCRIPT, request.code.encode("utf-8", "surrogatepass"))
        except OSError as error:
            raise RefusedError(422, f"files: cannot be written: {error}") from error
        if request.language == "bash":
            result = await sandbox.run(["bash", SCRIPT], stdin=stdin, limits=self._limits)
        else:
            result = await sandbox.run_program(request.code, stdin=stdin, limits=self._limits, shows_last=False, keeps_files=True)
        self.fetched = {}
        num_bytes = 0
        for path in request.fetch_files:
            try:
                content = await sandbox.read(path)
            except OSError:  # not there, or no file: left out, as the published service does
                continue
            num_bytes += len(content)
            if num_bytes > self._limits.disk_bytes:  # one file under many names would be held as often
                raise RefusedError(413, f"fetch_files: more than the {self._limits.disk_bytes} bytes that a program's files may take")
            self.fetched[path] = content
        return result


async def _is_there(http: Request) -> bool:
    return not await http.is_disconnected()


async def _body(http: Request, *, within_s: float) -> bytes:
    parts = bytearray()
    try:
        async with asyncio.timeout(within_s):
            async for chunk in http.stream():
                parts += chunk
                if len(parts) > MAX_BODY_BYTES:
                    raise RefusedError(413, f"a request is of at most {MAX_BODY_BYTES} bytes")
    except TimeoutError as error:
        raise RefusedError(408, f"the request's body did not arrive within {within_s:g} s") from error
    return bytes(parts)


def _parsed(body: bytes) -> RunCodeRequest:
    try:
        return RunCodeRequest.model_validate_json(body)
    except ValidationError as error:
        raise RefusedError(422, error.errors(include_url=False, include_context=False, include_input=False)) from error
