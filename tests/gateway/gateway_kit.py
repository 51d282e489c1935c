"""A real session router on a free port of this process, in front of a real engine; and sessions to open there."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager

import uvicorn

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
async def running_app(app):
    """The ASGI application on a free port of loopback; yields its URL."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
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
