"""`SessionRouter`: sessions over HTTP, each with OpenAI's and Anthropic's API.

| route | key | answer |
|---|---|---|
| POST /sessions | admin | a session bound to the spec in the body: id, api_key, base_url |
| POST /sessions/{id}<dialect> | session | one turn, streamed or not (`dialects/`) |
| GET /sessions/{id}/v1/models | session | the one model |
| GET /sessions/{id} | session | the record so far |
| DELETE /sessions/{id}[?abort=true] | admin | waits for turns in flight (or cancels them), then the record; the session is gone |
| GET /health, /metrics | none | alive; counters |

The session's key comes as `Authorization: Bearer` or `x-api-key`, where every client puts its API key. A client that goes away cancels
its turn, down to the engine.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse

from psrl.errors import SessionRequestError
from psrl.gateway.dialects import DIALECTS
from psrl.gateway.dialects.base import ChatRequest, ChatTurn, Dialect
from psrl.gateway.sessions import Session, SessionTable, closing_error
from psrl.gateway.turns import TurnTaker
from psrl.session_client.bodies import record_to_json, spec_from_json
from psrl.types import Message, Outcome

MAX_BODY_BYTES = 64 * 2**20
KEEP_ALIVE_S = 5.0
"""Between the events that a streaming client gets while its turn is sampled."""

PATIENCE_S = 20.0
"""A client that leaves earlier changed its mind; later, its own time-out has passed."""

Endpoint = Callable[[Request], Awaitable[Response]]


class SessionRouter:
    """The routes around a table of sessions."""

    def __init__(self, table: SessionTable, taker: TurnTaker, *, admin_key: str, model_name: str) -> None:
        """`admin_key` opens and deletes sessions."""
        self._table = table
        self._taker = taker
        self._admin_key = admin_key
        self._model_name = model_name
        self._counts: Counter[str] = Counter()

    def app(self) -> FastAPI:
        """The ASGI application. Its routes read raw bodies, since every millisecond of a turn counts."""

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            expiry = asyncio.create_task(self._table.expire_idle(), name="expire idle sessions")
            try:
                yield
            finally:
                expiry.cancel()

        app = FastAPI(title="psrl session router", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
        app.add_route("/sessions", _answered(self._open), methods=["POST"])
        app.add_route("/sessions/{id}", _answered(self._record), methods=["GET"])
        app.add_route("/sessions/{id}", _answered(self._delete), methods=["DELETE"])
        app.add_route("/sessions/{id}/v1/models", _answered(self._models), methods=["GET"])
        for dialect in DIALECTS:
            app.add_route(f"/sessions/{{id}}{dialect.path}", self._turns_of(dialect), methods=["POST"])
        app.add_route("/health", _answered(self._health), methods=["GET"])
        app.add_route("/metrics", _answered(self._metrics), methods=["GET"])
        return app

    async def _open(self, request: Request) -> Response:
        self._check_admin(request, "sessions are opened")
        session = self._table.open(spec_from_json(await _json(request)))
        url = f"{str(request.base_url).rstrip('/')}/sessions/{session.id}"
        return _json_response({"id": session.id, "api_key": session.api_key, "base_url": f"{url}/v1"}, status=201)

    async def _record(self, request: Request) -> Response:
        return _json_response(record_to_json(self._session_of(request).record()))

    async def _delete(self, request: Request) -> Response:
        abort = request.query_params.get("abort", "false")
        if abort not in ("true", "false"):
            raise SessionRequestError(status=400, code="invalid_value", param="abort", message=f"abort is true or false, got {abort!r}")
        self._check_admin(request, "sessions are deleted")
        session = self._table.of_id(request.path_params["id"])
        return _json_response(record_to_json(await self._table.close(session, abort=abort == "true")))

    async def _models(self, request: Request) -> Response:
        self._session_of(request)
        return _json_response({"object": "list", "data": [{"id": self._model_name, "object": "model", "created": 0, "owned_by": "psrl"}]})

    async def _health(self, _: Request) -> Response:
        return _json_response({"status": "ok"})

    async def _metrics(self, _: Request) -> Response:
        sessions = self._table.open_sessions
        samples = {
            "sessions_open": len(sessions),
            "sessions_opened_total": self._table.num_opened,
            "sessions_expired_total": self._table.num_expired,
            "turns_in_flight": sum(session.num_in_flight for session in sessions),
            **{f"{name}_total": value for name, value in self._counts.items()},
        }
        return PlainTextResponse("".join(f"psrl_gateway_{name} {value}\n" for name, value in samples.items()))

    def _turns_of(self, dialect: Dialect) -> Endpoint:
        async def turn(request: Request) -> Response:
            session = self._session_of(request)
            body = await _json(request)
            began = time.perf_counter()
            read_before = session.read_before[dialect.path]
            asked = dialect.read_request(body, history=lambda id: _history(session, id), read_before=read_before)
            placed = await self._taker.place(session, asked)
            self._counts["rendering_seconds"] += time.perf_counter() - began
            task = session.begin(self._taker.take(session, asked, placed))
            if asked.wants_stream:
                return StreamingResponse(self._stream(dialect, session, asked, task), media_type="text/event-stream")
            made = await self._unless_gone(request, session, task)
            return _json_response(dialect.write_answer(made, asked)) if made else Response(status_code=499)

        return _answered(turn, dialect.write_error)

    async def _unless_gone(self, request: Request, session: Session, task: asyncio.Task[ChatTurn]) -> ChatTurn | None:
        """The turn, or None where the client hung up first; then the turn is cancelled and not captured.

        Waits for: the turn. Unblocked by: its deadline, the client's disconnect, or the session's end.
        """
        began = time.monotonic()
        hung_up = asyncio.create_task(request.receive())  # the body is read: the next message is the disconnect
        try:
            await asyncio.wait({task, hung_up}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._gone(session, began)
                return None
            return self._made(task, session)
        finally:
            hung_up.cancel()
            task.cancel()

    async def _stream(self, dialect: Dialect, session: Session, asked: ChatRequest, task: asyncio.Task[ChatTurn]) -> AsyncIterator[bytes]:
        """Events of a turn: something to keep the connection while it is sampled, then all of it. A client that goes away ends this."""
        began = time.monotonic()
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=KEEP_ALIVE_S)
                if not task.done():
                    yield dialect.keep_alive
            try:
                turn = self._made(task, session)
            except SessionRequestError as error:
                yield dialect.write_stream_error(error)
                return
            for event in dialect.write_stream(turn, asked):
                yield event
        finally:
            if not task.done():
                self._gone(session, began)
                task.cancel()

    def _gone(self, session: Session, began: float) -> None:
        """A client left before its answer came. If it had waited long, the engines were too slow for it: that judges no policy."""
        self._counts["clients_gone"] += 1
        waited_s = time.monotonic() - began
        if waited_s >= PATIENCE_S and not session.is_closing:
            session.ran_into(Outcome.INFRA_ERROR, f"the agent gave up on a turn after waiting {waited_s:.0f} s for it")

    def _made(self, task: asyncio.Task[ChatTurn], session: Session) -> ChatTurn:
        if task.cancelled():
            raise closing_error(session.id)
        turn = task.result()
        self._counts["turns"] += 1
        self._counts["sampled_tokens"] += len(turn.generation.token_ids)
        self._counts["prompt_tokens"] += turn.generation.prompt_tokens
        self._counts["cached_tokens"] += turn.generation.cached_tokens
        return turn

    def _check_admin(self, request: Request, what: str) -> None:
        """An agent must not end its own session: the record would be lost, and with it the reward of a bad episode."""
        if not hmac.compare_digest(_key_of(request).encode(), self._admin_key.encode()):
            raise SessionRequestError(status=401, code="wrong_secret", message=f"{what} with the gateway's admin key")

    def _session_of(self, request: Request) -> Session:
        return self._table.get(request.path_params["id"], _key_of(request))


def _history(session: Session, id: str) -> Sequence[Message]:
    for turn in reversed(session.tree.turns):
        if turn.id == id:
            return turn.conversation()
    raise SessionRequestError(status=404, code="unknown_turn", message=f"session {session.id} has no turn {id!r}")


def _key_of(request: Request) -> str:
    bearer = request.headers.get("authorization", "")
    return bearer[7:].strip() if bearer[:7].lower() == "bearer " else request.headers.get("x-api-key", "")


async def _json(request: Request) -> Any:
    """The body's JSON, read in pieces so that one that is too large is refused before it is held."""
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise SessionRequestError(status=413, code="body_too_large", message=f"a request may have {MAX_BODY_BYTES} bytes")
        pieces.append(piece)
    try:
        return orjson.loads(b"".join(pieces))
    except orjson.JSONDecodeError as error:
        raise SessionRequestError(status=400, code="invalid_json", message=f"the body is not JSON: {error}") from error


def _plain_error(error: SessionRequestError) -> dict[str, Any]:
    return {"error": {"message": error.message, "code": error.code, "param": error.param}}


def _answered(endpoint: Endpoint, write_error: Callable[[SessionRequestError], dict[str, Any]] = _plain_error) -> Endpoint:
    """The endpoint, with its SessionRequestErrors written as answers."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except SessionRequestError as error:
            return _json_response(write_error(error), status=error.status)

    return answer


def _json_response(body: Any, *, status: int = 200) -> Response:
    try:
        content = orjson.dumps(body)
    except TypeError:  # a call's arguments hold an integer of more than 64 bits, which orjson does not write
        content = json.dumps(body).encode()
    return Response(content, status_code=status, media_type="application/json")
