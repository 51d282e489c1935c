"""One vLLM instance whose workers are on two nodes (raylets on this machine, each at an address of its own); part of `make test-vllm`."""

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from psrl.config.model import ModelConfig
from psrl.config.placement import Role
from psrl.config.rollout import RolloutConfig
from psrl.engine_client.client import HttpReplica
from psrl.processes.kept import RestartLimit
from psrl.runtime.actors.engine_replica import EngineReplicaActor
from psrl.runtime.actors.parameter_server import ParameterServerActor
from psrl.runtime.addresses import Addresses
from psrl.runtime.engines import vllm_python
from psrl.runtime.groups import Endpoints
from psrl.runtime.kept_actor import KeptActor, KeptLimits
from psrl.runtime.kept_replica import KeptReplica
from psrl.runtime.parameter_server import ParameterServer
from psrl.runtime.supervision import end_tasks
from tests.cluster.nodes import SECOND_ADDRESS, THIRD_ADDRESS, places_of_one_instance, two_nodes
from tests.engines.conftest import VLLM_START_S
from tests.engines.test_vllm_engine import PROMPT, reference_logprobs, turn
from tests.engines.tiny_models import save_tiny_qwen3
from tests.faults.faulty_run import END_LIMIT_S, POLL_S, SMALL, FaultyRun
from tests.runtime.command import start
from tests.runtime.weight_kit import mapped_versions, train_worker

pytestmark = pytest.mark.slow
LIMITS = KeptLimits(restarts=RestartLimit(max_restarts=2, window_s=3600), startup_s=VLLM_START_S, silent_after_s=60)


class Instance:
    """The replica as a run keeps it, with the weights of `pushed` ready to be brought."""

    def __init__(self, started_with, pushed, log_folder) -> None:
        rollout = RolloutConfig(
            name="vllm",
            tensor_model_parallel_size=2,
            device="cpu",
            num_threads=1,
            max_num_seqs=4,
            prompt_length=64,
            response_length=192,
            startup_timeout_s=VLLM_START_S,
            engine_python=vllm_python(RolloutConfig(name="vllm")),
        )
        places = places_of_one_instance()
        (self.follower_host,) = (follower.host for follower in places.followers(Role.REPLICA, 0))
        self.worker = train_worker(pushed, **places.options(Role.TRAIN_WORKER, 0))
        self.deaths: list[str] = []
        self._addresses = Addresses()
        kept = {"limits": LIMITS, "died": lambda name, cause: self.deaths.append(f"{name}: {cause}"), "note": print}
        options = places.options(Role.PARAMETER_SERVER, 0)
        self.server = ParameterServer(
            KeptActor("server", lambda: ParameterServerActor.options(**options).remote(num_kept=2), prepare=None, **kept)
        )

        def make(port):
            return EngineReplicaActor.options(**places.options(Role.REPLICA, 0)).remote(
                index=0,
                model=ModelConfig(path=str(started_with)),
                rollout=rollout,
                log_folder=log_folder,
                weight_sync_s=120,
                host=places.host(Role.REPLICA, 0),
                port=port,
                followers=places.followers(Role.REPLICA, 0),
            )

        settings = {"moved": self._addresses.move, "parameter_server": self.server, "sync_s": 120, "stuck_after_s": 120, "num_nodes": 2}
        self.replica = KeptReplica("engine replica 0", make, **settings, **kept)

    async def start(self) -> None:
        url = await self.replica.start()
        self._addresses.set(Endpoints(generate_urls=[url]))
        await self.server.actor.ready()
        await self.replica.ready()


def processes(*words) -> list[psutil.Process]:
    """Children of this test whose command lines have all of these."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            line = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        if all(word in line for word in words):
            found.append(process)
    return found


def vllms(model) -> list[psutil.Process]:
    """All processes of the instance that was started with a model's folder."""
    return [process for root in processes("psrl.engines.vllm", str(model)) for process in (root, *root.children(recursive=True))]


def maps_of_vllm(model) -> list[list[str]]:
    return [Path(f"/proc/{process.pid}/maps").read_text().splitlines() for process in vllms(model)]


def inodes_of(version, model) -> set[str]:
    """The copies of a version that vLLM's workers have mapped."""
    name = f"psrl-weights-{version}"
    return {
        inode for process in vllms(model) for found, inodes in mapped_versions(process.pid).items() if found == name for inode in inodes
    }


async def check_turns(replica, folder, version) -> None:
    """Four turns at once, each with the logprobs of a forward pass."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    client = HttpReplica(replica.url, request_timeout_s=120, control_timeout_s=120)
    try:
        for sampled in await asyncio.gather(*(client.generate(turn(f"t{seed}", seed=seed)) for seed in range(4))):
            assert sampled.policy_versions == [version] * 24
            assert sampled.logprobs == pytest.approx(reference_logprobs(model, PROMPT, sampled.token_ids), abs=1e-4)
    finally:
        await client.close()


async def life(instance, started_with, pushed) -> None:
    replica = instance.replica
    await instance.start()
    keeping = asyncio.create_task(replica.keep())
    try:
        assert not [
            line
            for maps in maps_of_vllm(started_with)
            for line in maps
            if "/dev/shm/" in line and "sem.mp-" not in line and not line.endswith(" (deleted)")
        ]
        await check_turns(replica, started_with, 0)
        manifest = await instance.server.push([instance.worker], 1, deadline_s=120)
        result = await replica.sync(manifest, "keep")
        assert result.brought.num_bytes == manifest.total_bytes  # to one of the nodes; on the other the trainer has it
        assert len(inodes_of(1, started_with)) == 2
        await check_turns(replica, pushed, 1)

        (follower,) = processes("psrl.engines.vllm", "--node-rank 1")
        whole = vllms(started_with)
        os.kill(follower.pid, signal.SIGKILL)
        _, alive = await asyncio.to_thread(psutil.wait_procs, whole, timeout=60)
        assert not alive  # the whole instance is lost with one of its nodes
        await asyncio.wait_for(replica.until_up(), VLLM_START_S)
        assert [death.partition("; last words")[0] for death in instance.deaths] == [
            f"engine replica 0: engine replica 0's follower on {instance.follower_host} ended with code -9"
        ]
        await check_turns(replica, pushed, 1)
    finally:
        await end_tasks([keeping], 10)
    whole = vllms(started_with)
    await asyncio.wait_for(replica.handle.stop.remote(), 60)
    assert not (await asyncio.to_thread(psutil.wait_procs, whole, timeout=60))[1]


def test_one_instance_serves_from_two_nodes_takes_weights_on_both_and_is_started_again_as_a_whole(tmp_path):
    started_with, pushed = (save_tiny_qwen3(tmp_path / str(seed), seed=seed) for seed in (1, 5))
    with two_nodes() as nodes:
        ray.init(address=nodes.address, log_to_driver=False)
        try:
            asyncio.run(life(Instance(started_with, pushed, tmp_path), started_with, pushed))
        finally:
            ray.shutdown()


def test_a_run_goes_on_with_its_instance_on_other_nodes_after_one_of_them_is_lost(tmp_path):
    gen = "gen_actor_rollout_ref.rollout"
    engine = (f"{gen}.name=vllm", f"{gen}.tensor_model_parallel_size=2", "psrl.deployment.nodes_per_instance=[2]", f"{gen}.max_num_seqs=16")
    patience = (f"{gen}.startup_timeout_s={VLLM_START_S}", f"psrl.deadlines.startup_s={VLLM_START_S}", "psrl.deadlines.data_plane_s=300")
    with two_nodes() as nodes:
        nodes.add_third()
        run = FaultyRun(tmp_path, "lost part of an instance", settings=(*engine, *patience, *nodes.settings()))
        run.command = start(tmp_path, "train", run.recipe, *SMALL, f"trainer.default_local_dir={tmp_path}", *run.settings)
        until_step(run, 1)
        assert f"{SECOND_ADDRESS}: engine replica, agent worker" in run.now.log()
        assert f"{THIRD_ADDRESS}: follower of engine replica" in run.now.log()
        nodes.kill_second()
        until_step(run, run.num_steps() + 1)
        here = nodes.address.partition(":")[0]
        assert f"engine replica 0 goes to {THIRD_ADDRESS} and {here}: its node is lost" in run.now.log()
        gaps = [metrics["train/logprob_gap/max"] for metrics in run.metrics().values() if "train/logprob_gap/max" in metrics]
        assert gaps and max(gaps) < 1e-2
        run.now.interrupt()
        run.now.output(END_LIMIT_S)
        assert run.now.process.returncode == 0, run.now.log()
        assert run.now.leftovers() == []


def until_step(run, step) -> None:
    """vLLM's start may fall into the wait."""
    until = time.monotonic() + VLLM_START_S
    while run.num_steps() < step:
        assert run.now.process.poll() is None and time.monotonic() < until, run.now.log()
        run.now.look()
        time.sleep(POLL_S)
