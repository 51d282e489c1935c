"""SMG, the released program, in front of scripted engines that are processes of their own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import asynccontextmanager

import aiohttp
import pytest

from psrl.engine_client.client import HttpGenerator, HttpReplica
from psrl.errors import EngineError, EngineRequestError, GatewayError, ProcessDiedError
from psrl.gateway.smg import Smg
from psrl.processes.child import ChildProcess
from psrl.processes.kept import RestartLimit
from psrl.types import GenerateRequest, SamplingParams

LIMIT = RestartLimit(max_restarts=3, window_s=60.0)
LATENCY_S = 0.1
"""Of engines whose sessions must spread: SMG spreads by the sessions that have a turn in flight, and draws lots where none has."""
STARTER = """
import asyncio, sys
from pathlib import Path
from psrl.gateway.smg import Smg
from psrl.processes.kept import RestartLimit
async def start():
    smg = Smg(Path(sys.argv[1]), limit=RestartLimit())
    await smg.start([])
    print(smg.pid, flush=True)
asyncio.run(start())
sys.stdin.read()
"""


def engine(folder, token, *, port=0, **turn):
    folder.mkdir(exist_ok=True)
    (folder / "script.json").write_text(json.dumps({"turns": [{"token_ids": [token], **turn}]}))
    argv = [sys.executable, "-m", "psrl.engines.scripted", "--script", str(folder / "script.json")]
    return ChildProcess(f"engine {token}", argv, log_path=folder / "engine.log", port=port)


def request(session):
    return GenerateRequest(request_id=f"r-{session}", token_ids=[1, 2], session=session, sampling=SamplingParams(max_tokens=2))


class Fleet:
    """SMG, its engines (each samples a token of its own) and a generator that retries for twenty seconds."""

    def __init__(self, folder, smg, engines, generator):
        self.folder, self.smg, self.engines, self.generator = folder, smg, engines, generator

    async def token_of(self, session):
        return (await self.generator.generate(request(session))).token_ids[0]

    async def tokens_of(self, sessions):
        return dict(zip(sessions, await asyncio.gather(*(self.token_of(session) for session in sessions)), strict=True))


@asynccontextmanager
async def running(folder, *tokens, **turn):
    engines = [engine(folder / str(token), token, **turn) for token in tokens]
    smg = Smg(folder / "smg.log", limit=LIMIT)
    try:
        await asyncio.gather(*(each.start(60) for each in engines))
        await smg.start([each.url for each in engines])
        generator = HttpGenerator([smg.url], request_timeout_s=20, retry_for_s=20)
        keeping = asyncio.create_task(smg.keep())
        try:
            yield Fleet(folder, smg, engines, generator)
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
            await generator.close()
    finally:
        await smg.stop()
        for each in engines:
            each.stop()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Runs bodies on one fleet of two replicas, for tests that leave it as it was."""
    with asyncio.Runner() as runner:
        context = running(tmp_path_factory.mktemp("shared"), 10, 20, latency_s=LATENCY_S)
        fleet = runner.run(context.__aenter__())
        try:
            yield lambda body: runner.run(asyncio.wait_for(body(fleet), 60))
        finally:
            runner.run(context.__aexit__(None, None, None))


def run(body, folder, *tokens, **turn):
    async def all_of_it():
        async with running(folder, *tokens, **turn) as fleet, asyncio.timeout(60):
            return await body(fleet)

    return asyncio.run(all_of_it())


async def until(is_so):
    """Within the minute that every test has."""
    while not is_so():  # noqa: ASYNC110 - what is waited for is another process
        await asyncio.sleep(0)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def test_sessions_spread_over_the_replicas_and_stay_where_they_are(shared):
    sessions = [f"s{n}" for n in range(8)]

    async def body(fleet):
        before = (await fleet.smg.metrics()).get("smg_router_requests_total", 0)
        rounds = [await fleet.tokens_of(sessions) for _ in range(3)]
        return rounds, (await fleet.smg.metrics())["smg_router_requests_total"] - before

    rounds, num_requests = shared(body)
    assert rounds[0] == rounds[1] == rounds[2]
    assert min(Counter(rounds[0].values())[token] for token in (10, 20)) >= 2
    assert num_requests == 24


def test_a_session_whose_name_is_longer_than_a_routing_key_stays_too(shared):
    sessions = ["long" * 100 + str(n) for n in range(6)]

    async def body(fleet):
        return [await fleet.tokens_of(sessions) for _ in range(3)]

    rounds = shared(body)
    assert rounds[0] == rounds[1] == rounds[2]
    assert set(rounds[0].values()) == {10, 20}


def test_ids_and_logprobs_pass_as_the_engine_gave_them(shared):
    async def body(fleet):
        through = await fleet.generator.generate(request("s"))
        direct = HttpReplica(fleet.engines[0 if through.token_ids[0] == 10 else 1].url)
        try:
            return through, await direct.generate(request("s"))
        finally:
            await direct.close()

    through, direct = shared(body)
    assert (through.token_ids, through.logprobs, through.policy_versions) == (direct.token_ids, direct.logprobs, direct.policy_versions)


def test_a_replica_joins_and_leaves_a_running_smg(tmp_path):
    async def body(fleet):
        late = engine(tmp_path / "late", 30, latency_s=LATENCY_S)
        try:
            await late.start(60)
            await fleet.smg.add_worker(late.url)
            joined = await fleet.tokens_of([f"new{n}" for n in range(8)])
            await fleet.smg.remove_worker(fleet.engines[0].url)
            workers = {worker.url for worker in await fleet.smg.workers()}
            return joined, await fleet.tokens_of(list(joined)), workers == {late.url}
        finally:
            late.stop()

    joined, after, only_the_late_one = run(body, tmp_path, 10, latency_s=LATENCY_S)
    assert set(joined.values()) == {10, 30}
    assert set(after.values()) == {30}
    assert only_the_late_one


def test_the_sessions_of_a_killed_replica_move_and_come_back_with_it(tmp_path):
    sessions = [f"s{n}" for n in range(6)]

    async def body(fleet):
        before = await fleet.tokens_of(sessions)
        dead = fleet.engines[0]
        os.kill(dead.pid, signal.SIGKILL)
        began = time.monotonic()
        moved = await fleet.tokens_of(sessions)
        seconds = time.monotonic() - began
        again = engine(tmp_path / "10", 10, port=dead.port, latency_s=LATENCY_S)
        fleet.engines.append(again)
        await again.start(60)
        while await fleet.tokens_of(sessions) != before:  # within the minute that the test has
            pass
        return set(before.values()), set(moved.values()), seconds

    before, moved, seconds = run(body, tmp_path, 10, 20, latency_s=LATENCY_S)
    assert (before, moved) == ({10, 20}, {20})
    assert seconds < 10, "two failed checks, one a second, then one more attempt"


def test_a_turn_in_flight_outlives_the_death_of_smg(tmp_path):
    async def body(fleet):
        turn = asyncio.create_task(fleet.token_of("s"))
        replica = HttpReplica(fleet.engines[0].url)
        while (await replica.metrics())["psrl_engine_running"] < 1:
            pass
        await replica.close()
        url, first = fleet.smg.url, fleet.smg.pid
        os.kill(first, signal.SIGKILL)
        return await turn, fleet.smg.url == url, fleet.smg.pid != first, fleet.smg.num_restarts

    assert run(body, tmp_path, 10, latency_s=1.0) == (10, True, True, 1)


def test_a_turn_waits_for_the_worker_that_smg_does_not_know_yet(tmp_path):
    """SMG answers 404, not 503, where nobody has joined: just after it was started again."""

    async def body(fleet):
        url = fleet.engines[0].url
        await fleet.smg.remove_worker(url)
        replica = HttpReplica(fleet.smg.url)
        try:
            with pytest.raises(EngineError, match=r"404.*No worker") as refused:
                await replica.generate(request("s"))
        finally:
            await replica.close()
        turn = asyncio.create_task(fleet.token_of("s"))
        await fleet.smg.add_worker(url)
        return await turn, isinstance(refused.value, EngineRequestError)

    assert run(body, tmp_path, 10) == (10, False)


def test_without_retries_the_death_of_smg_is_an_error(tmp_path):
    async def body(fleet):
        os.kill(fleet.smg.pid, signal.SIGKILL)
        generator = HttpGenerator([fleet.smg.url], retry_for_s=0)
        try:
            await generator.generate(request("s"))
        finally:
            await generator.close()

    with pytest.raises(EngineError, match="1 attempt"):
        run(body, tmp_path, 10)


def test_an_smg_that_ends_once_too_often_is_given_up_with_its_last_words(tmp_path):
    async def body():
        smg = Smg(tmp_path / "smg.log", limit=RestartLimit(max_restarts=1, window_s=60.0), report=reports.append)
        try:
            await smg.start([])
            keeping = asyncio.create_task(smg.keep())
            os.kill(smg.pid, signal.SIGKILL)
            await until(lambda: smg.num_restarts == 1)
            os.kill(smg.pid, signal.SIGKILL)
            await keeping
        finally:
            await smg.stop()

    reports = []
    with pytest.raises(
        ProcessDiedError, match=r"(?s)SMG died 2 times within 60 s, the last time: SMG ended with code -9; last words: .*version  1"
    ):
        asyncio.run(asyncio.wait_for(body(), 60))
    assert [report.partition(";")[0] for report in reports] == ["SMG ended with code -9"]


def test_smg_dies_with_a_parent_that_is_killed(tmp_path):
    argv = [sys.executable, "-c", STARTER, str(tmp_path / "smg.log")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline, "SMG outlived its parent"


def test_an_smg_that_cannot_start_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr("psrl.gateway.smg.FLAGS", ("--no-such-flag-of-smg",))
    with pytest.raises(ProcessDiedError, match=r"(?s)SMG ended with 2 at its start.*no-such-flag-of-smg"):
        asyncio.run(Smg(tmp_path / "smg.log", limit=LIMIT).start([]))


def test_a_machine_without_smg_is_told_to_install_it(tmp_path):
    (tmp_path / "smg").mkdir()
    (tmp_path / "smg" / "__init__.py").write_text("raise ImportError('no smg here')")
    (tmp_path / "key").write_text("key")
    argv = [sys.executable, "-m", "psrl.gateway.smg_launch", "--control-key-file", str(tmp_path / "key")]
    env = {"PYTHONPATH": f"{tmp_path}:{os.getcwd()}", "PATH": os.environ["PATH"]}
    with pytest.raises(ProcessDiedError, match=r"no smg here.*pip install smg"):
        asyncio.run(ChildProcess("SMG", argv, log_path=tmp_path / "log", env=env).start(30))


def test_a_worker_that_nobody_serves_is_named(tmp_path):
    with pytest.raises(GatewayError, match=r"does not take worker http://127\.0\.0\.1:1 after 1 s"):
        run(lambda fleet: fleet.smg.add_worker("http://127.0.0.1:1", timeout_s=1), tmp_path, 10)


def test_a_worker_that_smg_does_not_know_cannot_leave(shared):
    with pytest.raises(GatewayError, match="SMG has no worker http://nobody"):
        shared(lambda fleet: fleet.smg.remove_worker("http://nobody"))


def test_the_control_routes_want_the_key_that_only_the_owner_has(shared):
    async def body(fleet):
        statuses = {}
        async with aiohttp.ClientSession() as stranger:
            for method, path in (("GET", "/workers"), ("POST", "/workers"), ("POST", "/v1/rl/engine/pause?selector=engine%3Dvllm")):
                async with stranger.request(method, fleet.smg.url + path, json={"url": "http://127.0.0.1:1"}) as answer:
                    statuses[method, path] = answer.status
        return statuses | dict.fromkeys(fleet.folder.glob("*.key"), "a key file is left")

    assert set(shared(body).values()) == {401}


def test_one_call_to_smg_pauses_and_resumes_every_replica(shared):
    async def body(fleet):
        await fleet.smg.control("pause?mode=keep")
        turns = [asyncio.create_task(fleet.token_of(session)) for session in map(str, range(8))]
        done_while_paused, _ = await asyncio.wait(turns, timeout=0.3)
        await fleet.smg.control("resume")
        return len(done_while_paused), {await turn for turn in turns}

    assert shared(body) == (0, {10, 20})
