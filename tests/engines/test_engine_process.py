"""Engines as child processes: starts, failures, ends; and the client's behaviour when they fail."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from psrl.engine_client.client import HttpGenerator
from psrl.errors import EngineError, EngineRequestError, ProcessDiedError
from psrl.processes.child import ChildProcess
from psrl.types import GenerateRequest, SamplingParams

STARTER = """
import asyncio, sys
from pathlib import Path
from psrl.processes.child import ChildProcess
argv = [sys.executable, "-m", "psrl.engines.scripted", "--script", sys.argv[1]]
process = ChildProcess("engine", argv, log_path=Path(sys.argv[1] + ".log"))
asyncio.run(process.start(60))
print(process.pid, flush=True)
sys.stdin.read()
"""


def scripted(folder, *turns):
    folder.mkdir(exist_ok=True)
    (folder / "script.json").write_text(json.dumps({"turns": list(turns)}))
    argv = [sys.executable, "-m", "psrl.engines.scripted", "--script", str(folder / "script.json")]
    return ChildProcess("engine", argv, log_path=folder / "engine.log")


def request(session="s", prompt=(1, 2)):
    return GenerateRequest(request_id="r", token_ids=list(prompt), session=session, sampling=SamplingParams(max_tokens=4))


def run(processes, body, **options):
    async def all_of_it():
        try:
            await asyncio.gather(*(process.start(60) for process in processes))
            generator = HttpGenerator([process.url for process in processes], **options)
            try:
                return await asyncio.wait_for(body(generator), 60)
            finally:
                await generator.close()
        finally:
            for process in processes:
                process.stop()

    return asyncio.run(all_of_it())


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"


def test_an_engine_that_cannot_start_says_why(tmp_path):
    process = ChildProcess("engine", [sys.executable, "-m", "psrl.engines.torch", "--model-path", str(tmp_path)], log_path=tmp_path / "log")
    with pytest.raises(ProcessDiedError, match=r"config\.json cannot be read"):
        asyncio.run(process.start(60))


def test_a_cache_that_does_not_fit_is_refused_before_it_is_taken(tmp_path, qwen3_folder):
    argv = [sys.executable, "-m", "psrl.engines.torch", "--model-path", str(qwen3_folder), "--max-num-seqs", "100000000"]
    with pytest.raises(ProcessDiedError, match="does not fit"):
        asyncio.run(ChildProcess("engine", argv, log_path=tmp_path / "log").start(60))


def test_an_engine_dies_with_a_parent_that_is_killed(tmp_path):
    scripted(tmp_path, {"token_ids": [1]})
    argv = [sys.executable, "-c", STARTER, str(tmp_path / "script.json")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.send_signal(signal.SIGKILL)
        parent.wait(10)
    deadline = time.monotonic() + 10
    while is_alive(pid):
        assert time.monotonic() < deadline, "the engine outlived its parent"


def test_stop_ends_the_process_and_may_be_called_twice(tmp_path):
    process = scripted(tmp_path, {"token_ids": [1]})
    asyncio.run(process.start(60))
    process.stop()
    process.stop()
    assert process.poll() is not None


def test_an_engine_told_to_end_while_a_turn_runs_ends_without_a_word(tmp_path):
    process = scripted(tmp_path, {"failure": "hang"})

    async def body(generator):
        running = asyncio.create_task(generator.generate(request()))
        while (await generator.replicas[0].metrics())["psrl_engine_running"] < 1:  # noqa: ASYNC110 (another process counts)
            await asyncio.sleep(0)
        await asyncio.to_thread(process.stop)
        with pytest.raises(EngineError, match=r"500.*engine is closed"):
            await running

    run([process], body, retry_for_s=0)
    assert "Traceback" not in process.last_words()


def test_a_client_that_hangs_up_inside_its_body_leaves_no_trace(tmp_path):
    process = scripted(tmp_path, {"token_ids": [3]})

    async def body(generator):
        host, port = process.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        return await generator.generate(request())

    assert run([process], body).token_ids == [3, 3, 3, 3]
    assert "Traceback" not in process.last_words()


def test_turns_of_a_session_stay_on_one_replica_and_sessions_spread(tmp_path):
    processes = [scripted(tmp_path / "a", {"token_ids": [10]}), scripted(tmp_path / "b", {"token_ids": [20]})]

    async def body(generator):
        return [[(await generator.generate(request(f"s{n}"))).token_ids[0] for n in range(8)] for _ in range(3)]

    rounds = run(processes, body)
    assert rounds[0] == rounds[1] == rounds[2]
    assert sorted(rounds[0]) == [10] * 4 + [20] * 4


@pytest.mark.parametrize("failure", ["error", "disconnect"])
def test_a_failed_turn_is_tried_again(tmp_path, failure):
    process = scripted(tmp_path, {"failure": failure}, {"token_ids": [3]})
    assert run([process], lambda generator: generator.generate(request())).token_ids == [3, 3, 3, 3]


@pytest.mark.parametrize(("failure", "cause"), [("error", "500"), ("disconnect", "ClientPayloadError"), ("hang", "no answer within")])
def test_a_turn_that_never_works_ends_in_an_error_that_names_the_cause(tmp_path, failure, cause):
    process = scripted(tmp_path, {"failure": failure})
    with pytest.raises(EngineError, match=f"2 attempts failed in .*{cause}"):
        run([process], lambda generator: generator.generate(request()), retry_for_s=0.15, request_timeout_s=0.5)


def test_a_wrong_request_is_not_tried_again(tmp_path):
    process = scripted(tmp_path, {"token_ids": [3]})
    with pytest.raises(EngineRequestError, match="token_ids"):
        run([process], lambda generator: generator.generate(request(prompt=())))


def test_a_session_moves_when_its_replica_is_killed(tmp_path):
    processes = [scripted(tmp_path / "a", {"token_ids": [10]}), scripted(tmp_path / "b", {"token_ids": [20]})]

    async def body(generator):
        before = (await generator.generate(request())).token_ids[0]
        os.kill(processes[0 if before == 10 else 1].pid, signal.SIGKILL)
        return before, (await generator.generate(request())).token_ids[0]

    assert sorted(run(processes, body)) == [10, 20]
