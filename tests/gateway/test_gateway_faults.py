"""Faults of whole processes behind a session, and what many sessions leave in the router: nothing."""

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import psutil
import pytest

from psrl.engine_client.client import HttpReplica
from psrl.errors import GatewayError
from psrl.gateway.smg import Smg
from psrl.processes.child import ChildProcess
from psrl.processes.kept import RestartLimit
from psrl.recipes import retool_tiny
from psrl.session_client.client import SessionClient
from psrl.types import Outcome
from tests.gateway.gateway_kit import ADMIN_KEY, session_spec

MODEL = str(Path(retool_tiny.__file__).parent / "model")
QUESTION = {"model": "any", "messages": [{"role": "user", "content": "hello"}]}
IDS = list(range(40, 60))
START_LIMIT_S = 60.0


@asynccontextmanager
async def running(folder, *, num_engines, per_token_s, retry_for_s):
    """Engines, SMG and the router, each a process. Yields (client, engines, the router's process)."""
    script = {"turns": [{"token_ids": IDS, "per_token_s": per_token_s, "finish_reason": "stop"}]}
    (folder / "script.json").write_text(json.dumps(script))
    (folder / "key").write_text(ADMIN_KEY)
    argv = [sys.executable, "-m", "psrl.engines.scripted", "--script", str(folder / "script.json")]
    engines = [ChildProcess(f"engine {index}", argv, log_path=folder / f"engine-{index}.log") for index in range(num_engines)]
    smg = Smg(folder / "smg.log", limit=RestartLimit())
    router = None
    try:
        await asyncio.gather(*(engine.start(START_LIMIT_S) for engine in engines))
        await smg.start([engine.url for engine in engines])
        argv = [sys.executable, "-m", "psrl.gateway", "--model-path", MODEL, "--engine-url", smg.url]
        argv += ["--admin-key-file", str(folder / "key"), "--retry-for-s", str(retry_for_s)]
        router = ChildProcess("router", argv, log_path=folder / "router.log")
        await router.start(START_LIMIT_S)
        client = SessionClient(router.url, admin_key=ADMIN_KEY)
        try:
            yield client, engines, psutil.Process(router.pid)
        finally:
            await client.aclose()
    finally:
        if router is not None:
            router.stop()
        await smg.stop()
        for engine in engines:
            engine.stop()


async def busy_engine(engines):
    """The engine that decodes now."""
    replicas = [HttpReplica(engine.url) for engine in engines]
    try:
        for _ in range(2000):
            for engine, replica in zip(engines, replicas, strict=True):
                if (await replica.metrics())["psrl_engine_running"]:
                    return engine
        raise AssertionError("no engine got the turn")
    finally:
        await asyncio.gather(*(replica.close() for replica in replicas))


def kill_in_a_turn(folder, *, num_engines, retry_for_s):
    """One turn whose engine is killed in the middle of it: (the answer or the error, the session's record)."""

    async def play():
        async with running(folder, num_engines=num_engines, per_token_s=0.1, retry_for_s=retry_for_s) as (client, engines, _):
            address = await client.open(session_spec())
            turn = asyncio.create_task(client.chat(address, QUESTION, timeout_s=60))
            os.kill((await busy_engine(engines)).pid, signal.SIGKILL)
            (answer,) = await asyncio.gather(turn, return_exceptions=True)
            return answer, await client.close(address, abort=False)

    return asyncio.run(asyncio.wait_for(play(), 120))


def test_the_turn_of_a_killed_replica_is_sampled_by_another(tmp_path):
    answer, record = kill_in_a_turn(tmp_path, num_engines=2, retry_for_s=30.0)
    assert answer["usage"]["completion_tokens"] == len(IDS)
    assert record.end is None
    (step,) = record.trajectories[0].steps
    assert step.sampled_ids == IDS


def test_a_turn_that_no_replica_is_left_for_ends_as_a_fault_that_is_not_the_agents(tmp_path):
    answer, record = kill_in_a_turn(tmp_path, num_engines=1, retry_for_s=1.0)
    assert isinstance(answer, GatewayError)
    assert "503" in str(answer)
    assert "engine_unavailable" in str(answer)
    assert record.end is Outcome.INFRA_ERROR
    assert record.trajectories == ()


async def play_sessions(client, http, count):
    """`count` sessions, 32 at once: two turns each; every third is left by its client in mid-stream, every fifth aborted."""
    numbers = iter(range(count))

    async def worker():
        for number in numbers:
            address = await client.open(session_spec(f"soak-{number}-e0"))
            answer = await client.chat(address, QUESTION, timeout_s=60)
            messages = [*QUESTION["messages"], answer["choices"][0]["message"], {"role": "user", "content": f"again {number}"}]
            headers = {"authorization": f"Bearer {address.api_key}"}
            body = {"messages": messages, "stream": True}
            async with http.post(f"{address.base_url}/chat/completions", json=body, headers=headers) as answer:
                assert answer.status == 200
                if number % 3:
                    await answer.read()
            await client.close(address, abort=number % 5 == 0)

    await asyncio.gather(*(worker() for _ in range(32)))


async def samples(client, http):
    async with http.get(f"{client.url}/metrics") as answer:
        lines = [line.rpartition(" ") for line in (await answer.text()).splitlines()]
    return {name.removeprefix("psrl_gateway_"): float(value) for name, _, value in lines}


@pytest.mark.parametrize("num_sessions", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_sessions_leave_nothing_in_the_router(tmp_path, num_sessions):
    async def play():
        async with (
            running(tmp_path, num_engines=1, per_token_s=0.0, retry_for_s=5.0) as (client, _, router),
            aiohttp.ClientSession() as http,
        ):
            await play_sessions(client, http, 500)
            before = router.memory_info().rss
            await play_sessions(client, http, num_sessions)
            after = router.memory_info().rss
            left = await samples(client, http)
        return before, after, left

    before, after, left = asyncio.run(asyncio.wait_for(play(), 600))
    assert left["sessions_open"] == 0
    assert left["turns_in_flight"] == 0
    assert left["sessions_opened_total"] == num_sessions + 500
    assert after <= 1.1 * before, f"{before / 2**20:.1f} MiB before, {after / 2**20:.1f} MiB after {num_sessions} sessions"
