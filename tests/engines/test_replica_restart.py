"""Turns whose replica is killed: natively they wait for its restart, or go to another; through SMG a cancellation and a move of weights
reach the engine all the same."""

import asyncio
import json
import os
import signal
import sys
from contextlib import asynccontextmanager

import pytest

from psrl.engine_client.client import HttpGenerator, HttpReplica
from psrl.engine_client.whole_turn import whole_turn
from psrl.gateway.smg import Smg
from psrl.processes.child import ChildProcess
from psrl.processes.kept import RestartLimit
from psrl.types import FinishReason, GenerateRequest, SamplingParams

pytestmark = pytest.mark.slow

SLOW_TURN = {"token_ids": [5, 6, 7, 8], "per_token_s": 0.01}


def engine(folder, *turns, port=0):
    folder.mkdir(exist_ok=True)
    (folder / "script.json").write_text(json.dumps({"turns": list(turns)}))
    argv = [sys.executable, "-m", "psrl.engines.scripted", "--script", str(folder / "script.json")]
    return ChildProcess("engine", argv, log_path=folder / "engine.log", port=port)


def request(*, max_tokens=400):
    return GenerateRequest(request_id="e-0", token_ids=[1, 2], session="e", sampling=SamplingParams(max_tokens=max_tokens, seed=1))


async def when_running(replica, *, num_sampled=1):
    while True:
        metrics = await replica.metrics()
        if metrics["psrl_engine_running"] == 1 and metrics["psrl_engine_sampled_tokens_total"] >= num_sampled:
            return


async def when_idle(replica):
    while (await replica.metrics())["psrl_engine_running"] > 0:  # noqa: ASYNC110 (another process counts)
        await asyncio.sleep(0)


def test_a_turn_outlives_the_death_and_the_restart_of_its_only_replica(tmp_path):
    async def go():
        process = engine(tmp_path, SLOW_TURN)
        await process.start(60)
        port = int(process.url.rpartition(":")[2])
        generator = HttpGenerator([process.url], request_timeout_s=30.0, retry_for_s=60.0)
        turn = asyncio.create_task(whole_turn(generator, request()))
        await when_running(generator.replicas[0], num_sampled=5)
        os.kill(process.pid, signal.SIGKILL)
        process.stop()
        again = engine(tmp_path, SLOW_TURN, port=port)
        try:
            await again.start(60)
            return await turn
        finally:
            again.stop()
            await generator.close()

    sampled = asyncio.run(asyncio.wait_for(go(), 120))
    assert (len(sampled.token_ids), sampled.finish_reason) == (400, FinishReason.LENGTH)


@asynccontextmanager
async def smg_before(tmp_path, *processes):
    smg = Smg(tmp_path / "smg.log", limit=RestartLimit(max_restarts=1, window_s=60.0))
    try:
        await asyncio.gather(*(process.start(60) for process in processes))
        await smg.start([process.url for process in processes])
        generator = HttpGenerator([smg.url], request_timeout_s=30.0, retry_for_s=30.0)
        replicas = [HttpReplica(process.url) for process in processes]
        try:
            yield generator, replicas
        finally:
            await asyncio.gather(generator.close(), *(replica.close() for replica in replicas))
    finally:
        await smg.stop()
        for process in processes:
            process.stop()


def test_through_smg_a_turn_goes_on_after_a_pause_that_gives_it_back(tmp_path):
    async def go():
        async with smg_before(tmp_path, engine(tmp_path / "a", SLOW_TURN)) as (generator, (replica,)):
            turn = asyncio.create_task(whole_turn(generator, request()))
            await when_running(replica, num_sampled=10)
            await replica.pause("abort")
            await replica.resume()
            return await turn

    sampled = asyncio.run(asyncio.wait_for(go(), 120))
    assert (sampled.num_resumes, len(sampled.token_ids), sampled.finish_reason) == (1, 400, FinishReason.LENGTH)


def test_through_smg_a_turn_that_nobody_waits_for_is_gone_at_the_engine(tmp_path):
    async def go():
        async with smg_before(tmp_path, engine(tmp_path / "a", SLOW_TURN)) as (generator, (replica,)):
            turn = asyncio.create_task(whole_turn(generator, request(max_tokens=100_000)))
            await when_running(replica, num_sampled=10)
            turn.cancel()
            await asyncio.wait([turn])
            await when_idle(replica)
            return turn.cancelled()

    assert asyncio.run(asyncio.wait_for(go(), 120))


def test_a_move_away_from_a_replica_that_answers_nothing_ends_and_its_turns_go_to_the_other_after_their_time_out(tmp_path):
    """It is stopped, not dead."""

    async def go():
        processes = [engine(tmp_path / name, {"token_ids": [token], "per_token_s": 0.01}) for name, token in (("a", 3), ("b", 4))]
        await asyncio.gather(*(process.start(60) for process in processes))
        generator = HttpGenerator([process.url for process in processes], request_timeout_s=5.0, retry_for_s=60.0)
        generator.place("e", 0)
        try:
            turn = asyncio.create_task(whole_turn(generator, request()))
            await when_running(generator.replicas[0], num_sampled=5)
            os.kill(processes[0].pid, signal.SIGSTOP)
            num_moved = await generator.move(["e"], 1)
            return num_moved, await turn
        finally:
            os.kill(processes[0].pid, signal.SIGCONT)
            for process in processes:
                process.stop()
            await generator.close()

    num_moved, sampled = asyncio.run(asyncio.wait_for(go(), 120))
    assert num_moved == 1
    assert sampled.token_ids == [4] * 400
