"""The engine contract over HTTP, in front of any `EngineCore`.

Bad input is answered 400 with `{"error": {"message", "field"}}`, what would change the sampling and is not known included; a failed
engine 500; a client that hangs up aborts its request.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from psrl import __version__
from psrl.engine_client.bodies import manifest_from_json
from psrl.engines.contract import EngineCore, PauseMode, SampledTurn, TurnFailure, TurnRequest
from psrl.errors import EngineError, WeightSyncError
from psrl.protocols import WeightReport
from psrl.types import FinishReason, PolicyVersion, SamplingParams

COMMAND_TIMEOUT_S = 600.0
"""A pause with `wait` ends with the longest running request."""
MAX_BODY_BYTES = 64 * 2**20
SAMPLING_FIELDS = frozenset(("max_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids", "logprobs"))
_own_ids = itertools.count()

Answer = TypeVar("Answer")
Routes = dict[tuple[str, str], Callable[[Request], Awaitable[Response]]]


class BadRequest(EngineError):
    """The client's mistake, with the field that has it."""

    is_retryable = False

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


def build_app(core: EngineCore) -> Starlette:
    """The contract's routes around `core`."""

    live: set[str] = set()  # own ids of the requests in the engine

    async def generate(request: Request) -> Response:
        turn_request = read_turn_request(await _json(request), core)
        live.add(turn_request.request_id)
        try:
            turn = await _run_turn(core, turn_request, request)
        finally:
            live.discard(turn_request.request_id)
        if turn is TurnFailure.DISCONNECT:
            return StreamingResponse(_cut_short(), headers={"content-length": "2"}, media_type="application/json")
        if turn is TurnFailure.ERROR:
            return _error(500, core.failure or "the engine failed")
        return _json_response(turn_json(turn_request, turn))

    async def health(_: Request) -> Response:
        return _error(500, core.failure) if core.failure else Response(status_code=200)

    async def models(_: Request) -> Response:
        card = {"id": core.model_name, "object": "model", "owned_by": "psrl", "max_model_len": core.max_model_len}
        return _json_response({"object": "list", "data": [card]})

    async def version(_: Request) -> Response:
        return _json_response({"version": __version__})

    async def metrics(_: Request) -> Response:
        return PlainTextResponse(prometheus_text(core))

    async def pause(request: Request) -> Response:
        mode = _choice(request.query_params, "mode", PauseMode.ABORT, tuple(PauseMode))
        clear_cache = _choice(request.query_params, "clear_cache", "true", ("true", "false"))
        await _finish(core.pause(PauseMode(mode), clear_cache=clear_cache == "true"))
        return _json_response({"status": "paused"})

    async def resume(_: Request) -> Response:
        await _finish(core.resume())
        return _json_response({"status": "resumed"})

    async def abort(request: Request) -> Response:
        body = await _json(request)
        named = body.get("request_ids")
        if named is None and body.get("abort_all") is True:
            return _json_response({"num_aborted": await _finish(core.abort(None))})
        if not isinstance(named, list) or not all(isinstance(one, str) for one in named):
            raise BadRequest("request_ids", "request_ids must be a list of strings, or abort_all true")
        wanted = set(named)
        own_ids = [own for own in live if own.rpartition("#")[0] in wanted]
        return _json_response({"num_aborted": await _finish(core.abort(own_ids))})

    async def reset_cache(_: Request) -> Response:
        await _finish(core.reset_prefix_cache())
        return Response(status_code=200)

    routes: Routes = {
        ("POST", "/generate"): generate,
        ("GET", "/health"): health,
        ("GET", "/v1/models"): models,
        ("GET", "/version"): version,
        ("GET", "/metrics"): metrics,
        ("POST", "/pause"): pause,
        ("POST", "/resume"): resume,
        ("POST", "/abort_requests"): abort,
        ("POST", "/reset_prefix_cache"): reset_cache,
    } | _weight_routes(core)
    return Starlette(
        routes=[Route(path, endpoint, methods=[method]) for (method, path), endpoint in routes.items()],
        exception_handlers={
            BadRequest: lambda _, error: _error(400, str(error), field=error.field),
            EngineError: lambda _, error: _error(500, str(error)),
            WeightSyncError: lambda _, error: _error(500, str(error)),
            ClientDisconnect: lambda *_: Response(status_code=400),  # in the middle of its body: nobody reads this
            TimeoutError: lambda _, error: _error(500, f"command took longer than {COMMAND_TIMEOUT_S:.0f} s"),
        },
    )


def _weight_routes(core: EngineCore) -> Routes:
    async def weight_info(_: Request) -> Response:
        return _json_response(report_json(core.weight_report()))

    async def update(request: Request) -> Response:
        info = (await _json(request)).get("update_info")
        if not isinstance(info, dict):
            raise BadRequest("update_info", "update_info must be a weight manifest")
        try:
            manifest = manifest_from_json(info)
        except EngineError as error:
            raise BadRequest("update_info", str(error)) from error
        return _json_response(report_json(await _finish(core.stage_weights(manifest))))

    async def finish_update(request: Request) -> Response:
        raw = (await _json(request)).get("weight_version")
        if not isinstance(raw, str) or not raw.isdecimal():
            raise BadRequest("weight_version", f"weight_version must be a number in a string, got {raw!r}")
        return _json_response(report_json(await _finish(core.commit_weights(PolicyVersion(int(raw))))))

    return {
        ("GET", "/weight_info"): weight_info,
        ("POST", "/start_weight_update"): weight_info,  # nothing to prepare: a version is staged whole
        ("POST", "/update_weights"): update,
        ("POST", "/finish_weight_update"): finish_update,
    }


def read_turn_request(body: dict[str, Any], core: EngineCore) -> TurnRequest:
    """Check a body of `/generate`; BadRequest names the field."""
    ids = body.get("token_ids")
    if not isinstance(ids, list) or not ids or not _are_integers(ids):
        raise BadRequest("token_ids", "token_ids must be a list of at least one integer")
    if min(ids) < 0 or max(ids) >= core.vocab_size:
        raise BadRequest("token_ids", f"token_ids must lie in 0..{core.vocab_size - 1}, got {min(ids)}..{max(ids)}")
    if len(ids) >= core.max_model_len:
        raise BadRequest("token_ids", f"prompt of {len(ids)} tokens leaves no room in max_model_len={core.max_model_len}")
    params = body.get("sampling_params", {})
    if not isinstance(params, dict):
        raise BadRequest("sampling_params", "sampling_params must be an object")
    for name in params.keys() - SAMPLING_FIELDS:
        if params[name] is not None:
            raise BadRequest(f"sampling_params.{name}", f"{name} is not known here; known: {', '.join(sorted(SAMPLING_FIELDS))}")
    if params.get("logprobs") not in (None, 0):
        raise BadRequest("sampling_params.logprobs", f"only the sampled token's logprob is given: 0, got {params['logprobs']!r}")
    stop_ids = params.get("stop_token_ids") or []
    if not isinstance(stop_ids, list) or not _are_integers(stop_ids):
        raise BadRequest("sampling_params.stop_token_ids", "must be a list of integers")
    seed = params.get("seed")
    if seed is not None and type(seed) is not int:
        raise BadRequest("sampling_params.seed", f"must be an integer, got {seed!r}")
    sampling = SamplingParams(
        max_tokens=_integer(params, "max_tokens", 16, low=1),
        temperature=_number(params, "temperature", 1.0, low=0, high=100),
        top_p=_number(params, "top_p", 1.0, low=1e-6, high=1),
        top_k=max(0, _integer(params, "top_k", 0, low=-1)),  # -1 turns it off too, as in vLLM
        seed=seed,
        stop_token_ids=tuple(stop_ids),
    )
    priority = body.get("priority", 0)
    if type(priority) is not int:
        raise BadRequest("priority", f"priority must be an integer, got {priority!r}")
    # A client may send an id twice (a retry); when the first hangs up, only that one must end.
    own_id = f"{body.get('request_id', '')}#{next(_own_ids)}"
    return TurnRequest(request_id=own_id, token_ids=ids, sampling=sampling, priority=priority)


def turn_json(request: TurnRequest, turn: SampledTurn) -> dict[str, Any]:
    """The contract's answer."""
    content = [{"token_id": one, "logprob": logprob} for one, logprob in zip(turn.token_ids, turn.logprobs, strict=True)]
    choice = {
        "index": 0,
        "finish_reason": turn.finish_reason.value,
        "stop_reason": turn.token_ids[-1] if turn.finish_reason is FinishReason.STOP else None,
        "token_ids": turn.token_ids,
        "logprobs": {"content": content},
        "weight_versions": version_spans(turn.versions),
    }
    usage = {
        "prompt_tokens": len(request.token_ids),
        "completion_tokens": len(turn.token_ids),
        "total_tokens": len(request.token_ids) + len(turn.token_ids),
        "prompt_tokens_details": {"cached_tokens": turn.cached_tokens},
    }
    return {"request_id": request.request_id.rpartition("#")[0], "choices": [choice], "usage": usage}


def version_spans(versions: list[int]) -> list[dict[str, Any]]:
    """Runs of equal versions: [7, 7, 8] -> 0..2 of "7", 2..3 of "8"."""
    spans: list[dict[str, Any]] = []
    end = 0
    for version, run in itertools.groupby(versions):
        start, end = end, end + len(list(run))
        spans.append({"version": str(version), "start": start, "end": end})
    return spans


def report_json(report: WeightReport) -> dict[str, Any]:
    """The body of `/weight_info`, `/update_weights` and `/finish_weight_update`."""
    return {
        "weight_version": str(report.version),
        "num_matched": report.num_matched,
        "num_expected": report.num_expected,
        "checksum": report.checksum,
    }


def prometheus_text(core: EngineCore) -> str:
    """`/metrics`."""
    load = core.load()
    samples = {
        "running": ("gauge", load.num_running),
        "waiting": ("gauge", load.num_waiting),
        "cache_usage": ("gauge", load.cache_usage),
        "cache_filled": ("gauge", load.cache_filled),
        "tokens_per_s": ("gauge", load.tokens_per_s),
        "prompt_tokens_total": ("counter", load.num_prompt_tokens),
        "cached_tokens_total": ("counter", load.num_cached_tokens),
        "sampled_tokens_total": ("counter", load.num_sampled_tokens),
        "weight_version": ("gauge", core.weight_report().version),
    }
    return "".join(f"# TYPE psrl_engine_{name} {kind}\npsrl_engine_{name} {value}\n" for name, (kind, value) in samples.items())


async def _run_turn(core: EngineCore, turn_request: TurnRequest, request: Request) -> SampledTurn | TurnFailure:
    done: Future[SampledTurn | TurnFailure] = Future()
    done.set_running_or_notify_cancel()  # nobody cancels it from here on: the core may always set its result
    core.submit(turn_request, done.set_result)
    if done.done():
        return done.result()
    answer = asyncio.wrap_future(done)
    hung_up = asyncio.ensure_future(request.receive())  # the body is read: the next message is the disconnect
    try:
        await asyncio.wait((answer, hung_up), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            core.abort([turn_request.request_id])
        return await asyncio.wait_for(answer, COMMAND_TIMEOUT_S)
    finally:
        hung_up.cancel()
        if not done.done():
            core.abort([turn_request.request_id])  # the server stops, or the engine did not end it in time


async def _cut_short() -> AsyncIterator[bytes]:
    """Half of the promised two bytes; the server then closes the connection."""
    yield b"{"


async def _finish(future: Future[Answer]) -> Answer:
    # Shielded: a command given up here stays the core's to end, and its future must not be cancelled under it.
    return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(future)), COMMAND_TIMEOUT_S)


async def _json(request: Request) -> dict[str, Any]:
    raw = await request.body()
    if len(raw) > MAX_BODY_BYTES:
        raise BadRequest("body", f"body of {len(raw)} bytes is larger than {MAX_BODY_BYTES}")
    try:
        body = orjson.loads(raw or b"{}")
    except orjson.JSONDecodeError as error:
        raise BadRequest("body", f"body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("body", "body must be a JSON object")
    return body


def _number(params: dict[str, Any], name: str, default: float, *, low: float, high: float) -> float:
    value = params.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise BadRequest(f"sampling_params.{name}", f"{name} must be a number in {low}..{high}, got {value!r}")
    return value


def _integer(params: dict[str, Any], name: str, default: int, *, low: int) -> int:
    value = _number(params, name, default, low=low, high=2**31)
    if value != int(value):
        raise BadRequest(f"sampling_params.{name}", f"{name} must be an integer, got {value!r}")
    return int(value)


def _are_integers(values: list[Any]) -> bool:
    return set(map(type, values)) <= {int}


def _choice(params: Mapping[str, str], name: str, default: str, choices: tuple[str, ...]) -> str:
    value = params.get(name, default)
    if value not in choices:
        raise BadRequest(name, f"{name} {value!r} is not one of {[str(one) for one in choices]}")
    return value


def _json_response(body: dict[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


def _error(status: int, message: str, *, field: str | None = None) -> Response:
    body = {"error": {"message": message, "field": field, "code": status}}
    return Response(orjson.dumps(body), status_code=status, media_type="application/json")
