"""Fifty episodes of mini-swe-agent in which something of the world fails: no reward, and nothing left. A few of them in the ordinary run.

An episode is that of the gold agent, so that each would be worth 1 had nothing failed.
"""

import asyncio
import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import docker
import pytest
from calc_project import PROBLEM, TEXT_YAML
from docker_engine import OwnEngine
from episode_kit import LastTurnScorer, ScriptedGenerator
from mini_swe_kit import GOLD_TURNS, agent_processes, block, play_episode, sandbox_processes, swe_task, write_yaml

from psrl.agent_loops.mini_swe_server import agent_server
from psrl.sandbox.leftover_containers import labelled_containers
from psrl.types import Outcome
from tests.gateway.gateway_kit import until

DOCKER = {"backend": "docker"}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="an Engine of one's own needs root")


class Watched(ScriptedGenerator):
    """Answers a turn a moment after it was asked for, so that something can fail in between."""

    async def generate(self, request):
        generation = await super().generate(request)
        await asyncio.sleep(0.05)
        return generation


def containers(url=None):
    """Of this process."""
    return [found for found, label in labelled_containers(url).items() if f".{os.getpid()}." in label]


def play(folder, fault=None, *, turn=0, turns=GOLD_TURNS, settings=None, task=None):
    """The episode's outcome, after `fault()` was done while `turn` was being sampled; nothing may be left."""
    generator = Watched(turns)
    settings = settings or {}

    async def meanwhile(_work):
        if fault is not None:
            await until(lambda: len(generator.requests) > turn)
            await asyncio.to_thread(fault)

    path = write_yaml(folder, TEXT_YAML)
    playing = play_episode(path, None, LastTurnScorer(), generator=generator, settings=settings, task=task, meanwhile=meanwhile)
    episode = asyncio.run(asyncio.wait_for(playing, 120))
    assert (agent_processes(), sandbox_processes()) == ([], [])
    return episode


def assert_never_judged(episode, *words):
    assert (episode.result.outcome, episode.score.reward, episode.result.submission) == (Outcome.INFRA_ERROR, None, None)
    assert any(word in episode.result.error for word in words), episode.result.error


def kill(*pids):
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def with_engine(url, use):
    client = docker.APIClient(base_url=url, timeout=60)
    try:
        for container in containers(url):
            use(client, container)
    finally:
        client.close()


REMOVALS = {
    "removed": lambda client, container: client.remove_container(container, force=True),
    "killed": lambda client, container: client.kill(container),
    "stopped": lambda client, container: client.stop(container, timeout=1),
}
SLEEPER = [GOLD_TURNS[0], block("sleep 20"), *GOLD_TURNS[1:]]


# ---------------------------------------------------------------- a few, in every run


def test_the_gold_agent_in_a_container_mends_and_leaves_none(tmp_path, docker_engine):
    episode = play(tmp_path, settings=DOCKER)
    assert (episode.result.outcome, episode.result.error) == (Outcome.FINISHED, None)
    assert "+    return a + b" in episode.result.submission.patch
    assert containers(docker_engine) == []


def test_a_container_removed_in_the_middle_is_no_fault_of_the_policys(tmp_path, docker_engine):
    episode = play(tmp_path, lambda: with_engine(docker_engine, REMOVALS["removed"]), turn=1, settings=DOCKER)
    assert_never_judged(episode, "SandboxError")
    assert containers(docker_engine) == []


def test_an_image_that_is_not_there_is_no_fault_of_the_policys(tmp_path, docker_engine):
    problem = replace(PROBLEM, image="127.0.0.1:9/no/such:image")
    assert_never_judged(play(tmp_path, task=swe_task(problem), settings=DOCKER), "could not be pulled")
    assert containers(docker_engine) == []


# ---------------------------------------------------------------- all fifty


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, DOCKER], ids=["bubblewrap", "docker"])
@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["KILL", "TERM"])
def test_twelve_agents_are_killed(tmp_path, docker_engine, settings, turn, number):
    episode = play(tmp_path, lambda: [os.kill(pid, number) for pid in agent_processes()], turn=turn, settings=settings)
    assert_never_judged(episode, f"the agent's process ended with {-number} and no word")
    assert containers(docker_engine) == []


@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_three_times_the_warm_process_is_killed_under_its_episode(tmp_path, turn):
    assert_never_judged(play(tmp_path, lambda: kill(agent_server()._process.pid), turn=turn), "ProcessDiedError")


@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("turns", [GOLD_TURNS, SLEEPER], ids=["between commands", "with one in flight"])
def test_six_sandboxes_are_killed(tmp_path, turn, turns):
    assert_never_judged(play(tmp_path, lambda: kill(*sandbox_processes()), turn=turn, turns=turns), "SandboxError")


@pytest.mark.slow
@pytest.mark.parametrize("turn", [0, 1, 2])
@pytest.mark.parametrize("removal", REMOVALS)
def test_nine_containers_are_taken_away(tmp_path, docker_engine, turn, removal):
    episode = play(tmp_path, lambda: with_engine(docker_engine, REMOVALS[removal]), turn=turn, settings=DOCKER)
    assert_never_judged(episode, "SandboxError")
    assert containers(docker_engine) == []


@pytest.mark.slow
@pytest.mark.parametrize("removal", REMOVALS)
def test_three_containers_are_taken_away_under_a_command(tmp_path, docker_engine, removal):
    def fault():
        asyncio.run(until(lambda: any(has_command(pid, "sleep") for pid in descendants_of_containers(docker_engine))))
        with_engine(docker_engine, REMOVALS[removal])

    episode = play(tmp_path, fault, turn=1, turns=SLEEPER, settings=DOCKER)
    assert_never_judged(episode, "SandboxError")
    assert containers(docker_engine) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "image",
    ["127.0.0.1:9/no/such:image", "no such name", "no-such-image", f"python@sha256:{'0' * 64}", "sha256:" + "0" * 64],
)
def test_five_images_are_not_there(tmp_path, docker_engine, image):
    episode = play(tmp_path, task=swe_task(replace(PROBLEM, image=image)), settings=DOCKER)
    assert_never_judged(episode, "image")
    assert containers(docker_engine) == []


@pytest.mark.slow
@pytest.mark.parametrize("url", ["unix:///nowhere/docker.sock", "tcp://127.0.0.1:9"])
def test_two_engines_are_not_there(tmp_path, url):
    assert_never_judged(play(tmp_path, settings={**DOCKER, "engine_url": url}), "SandboxUnavailableError", "SandboxError")


@pytest.mark.slow
@needs_root
def test_six_times_an_engine_stops_and_after_its_return_episodes_finish(tmp_path, own_engine):
    settings = {**DOCKER, "engine_url": own_engine.url}
    for turn in range(3):
        assert_never_judged(play(tmp_path, own_engine.stop, turn=turn, settings=settings), "SandboxError", "EnvironmentFault")
        assert_never_judged(play(tmp_path, settings=settings), "SandboxUnavailableError", "SandboxError")
        own_engine.start()
    assert play(tmp_path, settings=settings).result.outcome is Outcome.FINISHED
    assert containers(own_engine.url) == []


@pytest.fixture
def small_engine():
    """An Engine whose data lies on a disk of its own."""
    engine = OwnEngine()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3g", "psrl-test", engine.folder], check=True)
    try:
        yield engine.start()
    finally:
        engine.remove()


@pytest.mark.slow
@needs_root
def test_four_times_the_engines_disk_is_full(tmp_path, small_engine):
    settings = {**DOCKER, "engine_url": small_engine.url}
    assert play(tmp_path, settings=settings).result.outcome is Outcome.FINISHED
    filling = small_engine.folder / "filling"
    with filling.open("wb") as file, suppress(OSError):
        while True:
            file.write(bytes(2**20))
    for _ in range(4):
        assert_never_judged(play(tmp_path, settings=settings), "SandboxUnavailableError", "SandboxError", "EnvironmentFault")
    filling.unlink()
    assert play(tmp_path, settings=settings).result.outcome is Outcome.FINISHED
    assert containers(small_engine.url) == []


def has_command(pid, name):
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == name
    except OSError:
        return False


def descendants_of_containers(url):
    found = []
    with_engine(url, lambda client, container: found.extend(int(row[1]) for row in client.top(container)["Processes"]))
    return found
