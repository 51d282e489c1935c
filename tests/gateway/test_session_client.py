"""The client of sessions while their gateway is started again."""

import asyncio

import pytest
from gateway_kit import ADMIN_KEY, running_app, session_spec

from psrl.chat import HfRenderer
from psrl.errors import GatewayError, GatewayUnreachableError
from psrl.gateway.__main__ import build_router
from psrl.session_client.client import SessionClient
from tests.agent_loops.episode_kit import ScriptedGenerator, renderer


def router_app():
    made: HfRenderer = renderer()
    return build_router(
        made,
        ScriptedGenerator([]),
        admin_key=ADMIN_KEY,
        model_name="m",
        max_sessions=1,
        idle_timeout_s=60.0,
        turn_timeout_s=10.0,
    ).app()


def test_opening_a_session_waits_for_a_gateway_that_is_started_again():
    async def go():
        was_asked = asyncio.Event()

        async def hang_up(_, writer):
            writer.close()
            was_asked.set()

        dying = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        port = dying.sockets[0].getsockname()[1]
        client = SessionClient(f"http://127.0.0.1:{port}", admin_key=ADMIN_KEY, retry_for_s=30.0)
        opening = asyncio.create_task(client.open(session_spec()))
        await was_asked.wait()
        dying.close()
        await dying.wait_closed()
        async with running_app(router_app(), port=port):
            address = await opening
            with pytest.raises(GatewayError, match="too_many_sessions"):  # Its refusal is an answer: nothing is tried again.
                await client.open(session_spec("another"))
            await client.close(address, abort=True)
        await client.aclose()

    asyncio.run(asyncio.wait_for(go(), 60))


def test_a_gateway_that_does_not_come_back_is_an_error():
    async def go():
        client = SessionClient("http://127.0.0.1:9", admin_key=ADMIN_KEY, retry_for_s=0.3)
        with pytest.raises(GatewayUnreachableError, match=r"POST http://127\.0\.0\.1:9/sessions"):
            await client.open(session_spec())
        await client.aclose()

    asyncio.run(asyncio.wait_for(go(), 60))
