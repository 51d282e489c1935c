"""The warm process of mini-swe-agent and its forks: what they cost nobody, and that none is ever left."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from psrl.agent_loops import mini_swe_server
from psrl.agent_loops.mini_swe_server import PROGRAM, AgentServer, EpisodeProcess
from psrl.errors import ProcessDiedError
from psrl.sandbox.reaper import labelled_processes, reap
from tests.gateway.gateway_kit import until

START = {
    "task": "mend it",
    "model_class": "litellm_textbased",
    "model": {"model_name": "openai/policy", "model_kwargs": {"api_base": "http://127.0.0.1:1/v1", "api_key": "k", "max_retries": 0}},
    "environment": {"cwd": "/testbed", "timeout": 5, "env": {}, "interpreter": ["bash", "-c"]},
    "agent": {"system_template": "s", "instance_template": "{{task}}"},
}
"""An episode whose first turn finds nobody at the session's address."""


@pytest.fixture(scope="module")
def server():
    server = AgentServer()
    yield server
    server.close()


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except FileNotFoundError:
        return False


def children_of(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def test_the_program_of_the_agent_never_removes_files():
    """It runs in folders that others own: what is removed is said by who made it."""
    source = PROGRAM.read_text()
    assert [word for word in ("rmtree", "unlink", "rmdir", "os.remove", "shutil", "subprocess", "os.system") if word in source] == []


def test_an_agent_whose_session_is_gone_says_so_at_once_and_is_reaped(server):
    async def run():
        async with EpisodeProcess(server) as process:
            pid = process.fork.pid
            await process.send(START)
            message = await asyncio.wait_for(process.receive(), 20)
            assert await process.receive() is None
        return message["end"], pid

    end, pid = asyncio.run(run())
    assert (end["exit_status"], end["num_calls"], end["submission"]) == ("InternalServerError", 1, "")
    assert "Connection error" in end["error"]
    assert not Path(f"/proc/{pid}").exists()


def test_a_fork_has_nothing_of_the_workers_environment(server, monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")

    async def run():
        async with EpisodeProcess(server) as first, EpisodeProcess(server) as second:
            for process in (first, second):
                variables = dict(line.split("=", 1) for line in Path(f"/proc/{process.fork.pid}/environ").read_text().split("\0") if line)
                assert "HTTPS_PROXY" not in variables
                assert variables["HOME"] == variables["MSWEA_GLOBAL_CONFIG_DIR"]
                assert variables["LITELLM_LOCAL_MODEL_COST_MAP"] == "True"

    asyncio.run(run())


def test_a_killed_agent_is_an_end_without_a_word(server):
    async def run():
        async with EpisodeProcess(server) as process, EpisodeProcess(server) as other:
            os.kill(process.fork.pid, signal.SIGKILL)
            await process.send(START)
            # Also while a younger fork lives, which would hold the channel open if it had inherited it.
            assert await asyncio.wait_for(process.receive(), 20) is None
            assert is_alive(other.fork.pid)
        return process.exit_code

    assert asyncio.run(run()) == -signal.SIGKILL


def test_a_cancelled_episode_leaves_no_process(server):
    async def run():
        async def episode():
            async with EpisodeProcess(server) as process:
                pids.append(process.fork.pid)
                await asyncio.Event().wait()

        pids: list[int] = []
        work = asyncio.create_task(episode())
        await until(lambda: pids)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        early = asyncio.create_task(episode())
        await asyncio.sleep(0)
        early.cancel()  # while the fork is being asked for
        with pytest.raises(asyncio.CancelledError):
            await early
        return pids

    pids = asyncio.run(run())
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert children_of(server._process.pid) == set()


def test_an_episode_that_is_cancelled_between_its_fork_and_its_channel_leaves_no_process(server, monkeypatch):
    async def run():
        async def never(**_):
            is_reached.set()
            await asyncio.Event().wait()

        async def episode():
            async with EpisodeProcess(server):
                pass

        is_reached = asyncio.Event()
        await episode()  # so that the server is warm
        monkeypatch.setattr(asyncio, "open_connection", never)
        work = asyncio.create_task(episode())
        await is_reached.wait()
        assert len(children_of(server._process.pid)) == 1
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    asyncio.run(run())
    assert children_of(server._process.pid) == set()


def test_a_machine_without_a_free_process_fails_one_episode_and_not_those_that_run(tmp_path, monkeypatch):
    program = tmp_path / "second_fork_fails.py"
    program.write_text(
        textwrap.dedent(f"""
        import errno, itertools, os, runpy
        fork, number = os.fork, itertools.count(1)
        def limited():
            if next(number) == 2:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return fork()
        os.fork = limited
        runpy.run_path({str(PROGRAM)!r}, run_name="__main__")
        """)
    )
    monkeypatch.setattr(mini_swe_server, "PROGRAM", program)
    server = AgentServer()

    async def run():
        async with EpisodeProcess(server) as first:
            with pytest.raises(ProcessDiedError, match=r"cannot fork: .*Resource temporarily unavailable"):
                await EpisodeProcess(server).__aenter__()
            async with EpisodeProcess(server) as third:
                assert is_alive(first.fork.pid)
                assert third.fork.server_pid == first.fork.server_pid

    try:
        asyncio.run(run())
    finally:
        server.close()


def test_a_dead_server_takes_its_forks_along_and_the_next_episode_gets_a_new_one(server):
    async def run():
        async with EpisodeProcess(server) as process:
            old = server._process.pid
            os.kill(old, signal.SIGKILL)
            assert await asyncio.wait_for(process.receive(), 20) is None
        assert process.exit_code is None
        async with EpisodeProcess(server) as process:
            assert is_alive(process.fork.pid)
            assert server._process.pid != old

    asyncio.run(run())


def test_nothing_is_left_of_a_worker_that_was_killed(tmp_path):
    """Server and forks of another process, which ends by SIGKILL in the middle of an episode; in a folder that must be as it was."""
    program = textwrap.dedent("""
        import asyncio
        from psrl.agent_loops.mini_swe_server import AgentServer, EpisodeProcess

        async def main():
            server = AgentServer()
            async with EpisodeProcess(server) as first, EpisodeProcess(server) as second:
                print(server._process.pid, first.fork.pid, second.fork.pid, server._folder, flush=True)
                await asyncio.Event().wait()

        asyncio.run(main())
    """)
    (tmp_path / "kept").write_text("as it was")
    worker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    *pids, folder = worker.stdout.readline().split()
    pids = [int(pid) for pid in pids]
    assert [is_alive(pid) for pid in pids] == [True, True, True]
    labels = labelled_processes()
    assert all(pid in labels for pid in pids)  # The reaper knows them, should the kernel's way ever fail.
    worker.kill()
    worker.wait()
    worker.stdout.close()
    asyncio.run(until(lambda: not any(map(is_alive, pids))))
    assert (tmp_path / "kept").read_text() == "as it was"
    reap("agent")  # what the next worker does first
    assert not Path(folder).exists()
