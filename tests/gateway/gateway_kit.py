"""A real session router on a free port of this process, in front of a real engine; and sessions to open there."""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import asynccontextmanager

import uvicorn

from psrl.engine_client.client import HttpGenerator
from psrl.engines.scripted.core import ScriptedCore
from psrl.engines.scripted.script import Script, ScriptedTurn
from psrl.engines.server import build_app
from psrl.gateway.__main__ import build_router
from psrl.session_client.client import SessionClient
from psrl.types import EpisodeUid, GroupUid, PolicyVersion, SamplingContract, SessionLimits, SessionSpec

ADMIN_KEY = "admin-of-the-tests"
LIMITS = SessionLimits(max_turns=400, prompt_length=4096, response_length=100_000)


def session_spec(uid="train-0-000001-e0", *, seed=7, limits=LIMITS, **contract):
    return SessionSpec(
        uid=EpisodeUid(uid),
        group=GroupUid(uid.rpartition("-")[0] or uid),
        admitted_version=PolicyVersion(0),
        is_validation=False,
        contract=SamplingContract(seed=seed, **contract),
        limits=limits,
    )


@asynccontextmanager
async def running_app(app, *, port=0):
    """The ASGI application on a port of loopback, a free one unless it is given; yields its URL."""
    listener = socket.create_server(("127.0.0.1", port), backlog=1024)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # asyncio itself sets it on sockets with a protocol number only
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.wait_for(serving, 10)
        listener.close()


@asynccontextmanager
async def running_gateway(renderer, generator, *, max_sessions=10_000, idle_timeout_s=600.0, turn_timeout_s=60.0):
    """A router in front of `generator` (a `protocols.Generator`); yields a client that may open sessions."""
    router = build_router(
        renderer,
        generator,
        admin_key=ADMIN_KEY,
        model_name="test-model",
        max_sessions=max_sessions,
        idle_timeout_s=idle_timeout_s,
        turn_timeout_s=turn_timeout_s,
    )
    async with running_app(router.app()) as url:
        client = SessionClient(url, admin_key=ADMIN_KEY)
        try:
            yield client
        finally:
            await client.aclose()


@asynccontextmanager
async def scripted_engine(renderer, *turns, **script):
    """The scripted engine over HTTP in this process; a turn is a text (its end of turn is added) or a ScriptedTurn. Yields (url, core)."""
    made = [turn if isinstance(turn, ScriptedTurn) else ScriptedTurn(token_ids=tuple(sampled_ids(renderer, turn))) for turn in turns]
    core = ScriptedCore(Script(turns=tuple(made), **script))
    try:
        async with running_app(build_app(core)) as url:
            yield url, core
    finally:
        core.close()


def sampled_ids(renderer, text):
    """Ids of a turn that says `text` and ends."""
    return [*renderer.template.encode(text), renderer.stop_token_ids[0]]


@asynccontextmanager
async def scripted_gateway(renderer, *turns, retry_for_s=0.0, **gateway):
    """A gateway in front of one scripted engine. Yields (client, core)."""
    async with scripted_engine(renderer, *turns) as (url, core):
        generator = HttpGenerator([url], request_timeout_s=30.0, retry_for_s=retry_for_s)
        try:
            async with running_gateway(renderer, generator, **gateway) as client:
                yield client, core
        finally:
            await generator.close()


async def until(holds, *, timeout_s=20.0):
    """Wait until `holds()`; a test that waits longer fails."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "waited too long"
        await asyncio.sleep(0.005)
