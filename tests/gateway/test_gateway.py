"""The gateway as a run has it: SMG and the session router as child processes, in front of a scripted engine."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from psrl.config.rollout_gateway import RolloutGatewayConfig
from psrl.errors import GatewayError, ProcessDiedError
from psrl.gateway.gateway import Gateway, GatewayAddress, GatewaySettings
from psrl.processes.child import ChildProcess
from psrl.recipes import retool_tiny
from psrl.session_client.client import SessionClient
from tests.gateway.gateway_kit import session_spec

MODEL = str(Path(retool_tiny.__file__).parent / "model")
QUESTION = {"model": "any", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}


def run(folder, body, **limits):
    """`body(gateway, address, client)` while all of it is up."""
    (folder / "script.json").write_text(json.dumps({"turns": [{"token_ids": [40, 41, 42]}]}))
    argv = [sys.executable, "-m", "psrl.engines.scripted", "--script", str(folder / "script.json")]
    engine = ChildProcess("engine", argv, log_path=folder / "engine.log")
    settings = GatewaySettings(
        model_path=MODEL,
        tool_format="hermes",
        history_thinking="keep",
        request_timeout_s=20.0,
        startup_timeout_s=60.0,
        limits=RolloutGatewayConfig(**limits),
        log_folder=folder,
    )

    async def all_of_it():
        gateway = Gateway(settings)
        try:
            _, address = await asyncio.gather(engine.start(60), gateway.start())
            await gateway.attach([engine.url])
            client = SessionClient(address.url, admin_key=address.admin_key)
            try:
                return await asyncio.wait_for(body(gateway, client), 60)
            finally:
                await client.aclose()
        finally:
            await gateway.stop()
            engine.stop()

    return asyncio.run(all_of_it())


def router_of_this_process():
    return next(child.pid for child in psutil.Process().children() if "psrl.gateway" in child.cmdline())


def test_a_session_goes_on_through_the_death_of_smg_with_all_its_tokens(tmp_path):
    async def body(gateway, client):
        watching = asyncio.create_task(gateway.watch())
        address = await client.open(session_spec())
        first = await client.chat(address, QUESTION, timeout_s=30)
        os.kill(gateway.smg.pid, signal.SIGKILL)
        messages = [*QUESTION["messages"], first["choices"][0]["message"], {"role": "user", "content": "again"}]
        await client.chat(address, QUESTION | {"messages": messages}, timeout_s=30)
        watching.cancel()
        return await client.close(address, abort=False), gateway.smg.num_restarts

    record, num_restarts = run(tmp_path, body)
    assert num_restarts == 1
    assert [step.sampled_ids for step in record.trajectories[0].steps] == [[40, 41, 42]] * 2


def test_the_death_of_the_router_is_named_with_its_last_words(tmp_path):
    async def body(gateway, client):
        os.kill(router_of_this_process(), signal.SIGKILL)
        await gateway.watch()

    with pytest.raises(ProcessDiedError, match=r"session router ended with code -9; last words: session router: http"):
        run(tmp_path, body)


def test_a_gateway_takes_the_place_of_one_that_died_and_only_sessions_are_lost(tmp_path):
    async def body(gateway, client):
        lost = await client.open(session_spec())
        await gateway.stop()
        address = GatewayAddress(url=client.url, admin_key=gateway.admin_key_file.read_text(), smg_url=gateway.smg.url)
        successor = Gateway(gateway._settings)
        try:
            assert await successor.start(successor_of=address) == address
            await successor.attach(gateway.smg._worker_urls)
            with pytest.raises(GatewayError, match="unknown_session"):
                await client.chat(lost, QUESTION, timeout_s=30)
            return await client.chat(await client.open(session_spec()), QUESTION, timeout_s=30)
        finally:
            await successor.stop()

    assert run(tmp_path, body)["usage"]["completion_tokens"] == 3


def test_a_session_of_an_episode_that_is_played_again_takes_the_place_of_the_old_one(tmp_path):
    async def body(gateway, client):
        first, second = await client.open(session_spec()), await client.open(session_spec())
        await client.chat(second, QUESTION, timeout_s=30)
        with pytest.raises(GatewayError, match="unknown_session"):
            await client.chat(first, QUESTION, timeout_s=30)
        return await client.close(second, abort=False)

    assert run(tmp_path, body, max_sessions=1).num_turns == 1


def test_more_sessions_than_are_allowed_are_refused(tmp_path):
    async def body(gateway, client):
        await client.open(session_spec("a-e0"))
        await client.open(session_spec("b-e0"))

    with pytest.raises(GatewayError, match="too_many_sessions"):
        run(tmp_path, body, max_sessions=1)


def test_a_router_that_cannot_start_says_why(tmp_path):
    settings = GatewaySettings(
        model_path=str(tmp_path),
        tool_format="hermes",
        history_thinking="keep",
        request_timeout_s=1.0,
        startup_timeout_s=60.0,
        limits=RolloutGatewayConfig(),
        log_folder=tmp_path,
    )

    async def start():
        gateway = Gateway(settings)
        try:
            await gateway.start()
        finally:
            await gateway.stop()

    with pytest.raises(ProcessDiedError, match=r"(?s)session router ended with 1 at its start; last words: session router: "):
        asyncio.run(start())
