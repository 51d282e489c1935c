"""Weights from a real train worker to real engines over Ray: versions, modes, and deaths."""
# ruff: noqa: ASYNC110 (polling the metrics route is the point)

import asyncio
import json
import os
import signal

import psutil
import pytest
import ray
from ray.exceptions import RayActorError

from psrl.engine_client.client import HttpReplica
from psrl.errors import EngineError, WeightSyncError
from psrl.runtime.actors.parameter_server import ParameterServerActor
from psrl.types import FinishReason, GenerateRequest, SamplingParams
from tests.engines.tiny_models import save_tiny_qwen3
from tests.runtime.weight_kit import (
    WAIT_S,
    engines,
    listening_at,
    mapped_versions,
    open_files_of_trainer,
    replica_actor,
    train_worker,
    wait,
)

pytestmark = pytest.mark.slow
LONG = 900
"""Tokens of a turn that outlasts a sync."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_qwen3(tmp_path_factory.mktemp("model"), seed=1)


@pytest.fixture(scope="module")
def local_ray():
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def parts(local_ray, folder, tmp_path_factory):
    """A train worker and two replicas with their URLs."""
    logs = tmp_path_factory.mktemp("logs")
    replicas = [replica_actor(folder, logs, index) for index in range(2)]
    worker = train_worker(folder)
    urls = wait([replica.start.remote() for replica in replicas])
    yield worker, replicas, urls
    wait([replica.stop.remote() for replica in replicas])


@pytest.fixture
def server(parts):
    """A parameter server that has what the train worker has published so far."""
    server = ParameterServerActor.remote(num_kept=2, lease_s=5.0)
    wait(parts[0].republish.remote(server))
    yield server
    ray.kill(server)


def next_version(server) -> int:
    latest = wait(server.latest.remote())
    return 1 if latest is None else latest.version + 1


def turn(name: str, *, max_tokens: int = LONG):
    sampling = SamplingParams(max_tokens=max_tokens, seed=3)
    return GenerateRequest(request_id=name, token_ids=[1, 2, 3], session=name, sampling=sampling)


def beside(url: str, body):
    """Run `body(replica)` with a client of the engine."""

    async def run():
        replica = HttpReplica(url, request_timeout_s=WAIT_S)
        try:
            return await asyncio.wait_for(body(replica), WAIT_S)
        finally:
            await replica.close()

    return asyncio.run(run())


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_a_sync_inside_a_turn_does_with_it_what_its_mode_says(parts, server, mode):
    worker, replicas, urls = parts
    version = next_version(server)
    manifest = wait(worker.push.remote(server, version))

    async def body(engine):
        running = asyncio.create_task(engine.generate(turn("t")))
        async with asyncio.timeout(WAIT_S):
            while (await engine.metrics())["psrl_engine_running"] < 1:
                await asyncio.sleep(0)
        result = await replicas[0].sync.remote(server, version, mode)
        return result, await running

    result, generation = beside(urls[0], body)
    assert (result.report.version, result.report.checksum) == (version, manifest.checksum)
    assert result.report.num_matched == result.report.num_expected == len(manifest.tensors)
    assert 0 < result.paused_s < result.seconds
    old = version - 1 if version > 1 else 0
    expected = {
        "keep": (FinishReason.LENGTH, {old, version}),
        "abort": (FinishReason.ABORT, {old}),
        "wait": (FinishReason.LENGTH, {old}),
    }
    assert (generation.finish_reason, set(generation.policy_versions)) == expected[mode]
    load = wait(replicas[0].load.remote())
    assert (load.num_running, load.num_waiting) == (0, 0)
    assert load.tokens_per_s > 0


def test_a_sync_that_lets_turns_end_has_the_time_of_its_deadline_and_no_other(parts, server, folder, tmp_path):
    worker, _, _ = parts
    version = next_version(server)
    wait(worker.push.remote(server, version))
    (tmp_path / "script.json").write_text(json.dumps({"turns": [{"token_ids": [5], "per_token_s": 0.1}]}))
    replica = replica_actor(folder, tmp_path, 9, weight_sync_s=5.0, script_path=str(tmp_path / "script.json"))

    async def body(engine):
        running = asyncio.create_task(engine.generate(turn("t", max_tokens=300)))  # half a minute
        async with asyncio.timeout(WAIT_S):
            while (await engine.metrics())["psrl_engine_running"] < 1:
                await asyncio.sleep(0)
        try:
            with pytest.raises(EngineError, match=r"/pause\?mode=wait.*no answer within 5 s"):
                await replica.sync.remote(server, version, "wait")
        finally:
            await engine.abort()
        return await running

    assert set(beside(wait(replica.start.remote()), body).policy_versions) == {0}
    wait(replica.stop.remote())


def test_replicas_of_a_node_map_the_one_copy_that_was_pushed(parts, server):
    worker, replicas, _ = parts
    version = next_version(server)
    wait(worker.push.remote(server, version))
    results = wait([replica.sync.remote(server, version) for replica in replicas])
    assert len({result.report.checksum for result in results}) == 1
    inodes = [inode for process in engines() for inode in mapped_versions(process.pid)[f"psrl-weights-{version}"]]
    assert len(inodes) == 2
    assert len(set(inodes)) == 1
    assert not [name for name in os.listdir("/dev/shm") if "psrl" in name]


def test_versions_that_nobody_needs_are_freed_by_trainer_and_replicas(parts, server):
    worker, replicas, _ = parts
    for _ in range(4):
        version = next_version(server)
        wait(worker.push.remote(server, version))
        wait([replica.sync.remote(server, version) for replica in replicas])
    held = [name for name in open_files_of_trainer() if "psrl-weights" in name]
    assert len(held) == 2  # as the parameter server keeps
    for process in engines():
        assert set(mapped_versions(process.pid)) == {f"psrl-weights-{version}"}


def test_a_new_parameter_server_gets_the_versions_of_the_one_that_died(parts, server):
    worker, replicas, _ = parts
    version = next_version(server)
    wait(worker.push.remote(server, version))
    ray.kill(server)
    with pytest.raises(RayActorError):
        wait(worker.push.remote(server, version + 1))
    with pytest.raises(RayActorError):
        wait(replicas[0].sync.remote(server, version))
    successor = ParameterServerActor.remote(num_kept=2)
    wait(worker.republish.remote(successor))
    wait(worker.republish.remote(successor))
    assert wait(successor.latest.remote()).version == version
    assert wait(replicas[0].sync.remote(successor, version)).report.version == version
    wait(worker.push.remote(successor, version + 1))
    assert wait(replicas[0].sync.remote(successor, version + 1)).report.version == version + 1
    ray.kill(successor)


def test_a_version_that_is_not_held_changes_nothing(parts, server):
    worker, replicas, urls = parts
    version = next_version(server)
    wait(worker.push.remote(server, version))
    wait(replicas[0].sync.remote(server, version))
    with pytest.raises(WeightSyncError, match="not held"):
        wait(replicas[0].sync.remote(server, version + 1))
    generation = beside(urls[0], lambda engine: engine.generate(turn("t", max_tokens=4)))
    assert generation.policy_versions == [version] * 4


def test_a_writer_that_died_holds_up_the_next_for_no_longer_than_its_lease(parts, server):
    version = next_version(server)
    wait(server.begin_push.remote(version))  # and is never heard of again
    assert wait(parts[0].push.remote(server, version)).version == version


def test_a_replica_that_is_started_again_has_its_url_and_samples_nothing_before_it_has_the_weights(parts, server):
    worker, replicas, urls = parts
    version = next_version(server)
    wait(worker.push.remote(server, version))
    pid = next(process.pid for process in engines() if f":{urls[1].rpartition(':')[2]}" in listening_at(process))
    os.kill(pid, signal.SIGSTOP)  # it answers nothing, and no SIGTERM either
    assert wait(replicas[1].restart.remote()) == urls[1]
    assert not psutil.pid_exists(pid)

    async def body(engine):
        running = asyncio.create_task(engine.generate(turn("t", max_tokens=8)))
        async with asyncio.timeout(WAIT_S):
            while (await engine.metrics())["psrl_engine_waiting"] < 1:
                await asyncio.sleep(0)
        await replicas[1].sync.remote(server, version)
        return await running

    assert beside(urls[1], body).policy_versions == [version] * 8


def test_a_sync_that_a_restart_cuts_short_does_not_let_the_new_server_sample(parts, server):
    worker, replicas, urls = parts
    version = next_version(server)
    wait(worker.push.remote(server, version))

    async def body(engine):
        running = asyncio.create_task(engine.generate(turn("long")))
        async with asyncio.timeout(WAIT_S):
            while (await engine.metrics())["psrl_engine_running"] < 1:
                await asyncio.sleep(0)
        cut_short = replicas[1].sync.remote(server, version, "wait")  # waits for the turn
        restart = replicas[1].restart.remote()
        failed = await asyncio.gather(cut_short, running, return_exceptions=True)
        await restart
        queued = asyncio.create_task(engine.generate(turn("t", max_tokens=8)))
        async with asyncio.timeout(WAIT_S):
            while (await engine.metrics())["psrl_engine_waiting"] < 1:
                await asyncio.sleep(0)
        result = await replicas[1].sync.remote(server, version)
        return failed, result, await queued

    failed, result, generation = beside(urls[1], body)
    assert [type(error.cause if hasattr(error, "cause") else error) for error in failed] == [EngineError, EngineError]
    assert result.report.version == version
    assert generation.policy_versions == [version] * 8
