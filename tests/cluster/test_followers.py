"""A replica over two nodes as Ray's actors and processes have it: what dies, is named and is made anew as a whole.

vLLM itself is not needed for this: in its place each node runs the scripted engine (`tests/cluster/test_vllm_over_nodes.py` has vLLM).
"""

import asyncio
import json
import os
import signal
import stat
import sys

import psutil
import pytest
import ray

from psrl.config.model import ModelConfig
from psrl.config.placement import Role
from psrl.config.rollout import RolloutConfig
from psrl.errors import ProcessDiedError
from psrl.processes.kept import RestartLimit
from psrl.runtime.actors.engine_replica import EngineReplicaActor
from psrl.runtime.addresses import Addresses
from psrl.runtime.groups import Endpoints
from psrl.runtime.kept_actor import KeptLimits
from psrl.runtime.kept_replica import KeptReplica
from psrl.runtime.parameter_server import ParameterServer
from psrl.runtime.supervision import answer_of, end_tasks
from tests.cluster.nodes import places_of_one_instance, two_nodes

pytestmark = pytest.mark.slow
WAIT_S = 120
STAND_IN = """#!/bin/sh
{first}
while [ "$1" != "--fd" ]; do shift; done
exec {python} -m psrl.engines.scripted --script {script} "$@"
"""
FOLLOWER_FAILS = """case "$*" in *"--node-rank 1"*) echo "no room for weights"; exit 3;; *) exec sleep 600;; esac"""


def stand_in(folder, *, first="") -> str:
    """Takes the command line of vLLM's Python."""
    script = folder / "script.json"
    script.write_text(json.dumps({"turns": [{"token_ids": [5, 6]}]}))
    path = folder / f"python-{len(first)}"
    path.write_text(STAND_IN.format(first=first, python=sys.executable, script=script))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def maker(places, engine_python, log_folder):
    rollout = RolloutConfig(name="vllm", device="cpu", tensor_model_parallel_size=2, engine_python=engine_python)

    def make(port):
        return EngineReplicaActor.options(**places.options(Role.REPLICA, 0)).remote(
            index=0,
            model=ModelConfig(path="m"),
            rollout=rollout,
            log_folder=log_folder,
            weight_sync_s=WAIT_S,
            host=places.host(Role.REPLICA, 0),
            port=port,
            followers=places.followers(Role.REPLICA, 0),
        )

    return make


def engines(rank) -> list[psutil.Process]:
    """Processes of the instance with a node rank."""
    logs = {0: "engine-0.log", 1: "engine-0-node-1.log"}
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "psrl.engines.scripted" in process.cmdline() and os.readlink(f"/proc/{process.pid}/fd/1").endswith(f"/{logs[rank]}"):
                found.append(process)
        except (psutil.NoSuchProcess, FileNotFoundError):
            continue
    return found


def actor_of(process) -> psutil.Process:
    parent = process.parent()
    assert parent is not None
    return parent


FAULTS = {
    "the follower's process": (lambda: engines(1)[0], "follower on {host} ended with code -9"),
    "the follower's actor": (lambda: actor_of(engines(1)[0]), "follower on {host}: "),
    "the server": (lambda: engines(0)[0], "engine replica 0 ended with code -9"),
    "the replica's actor": (lambda: actor_of(engines(0)[0]), "died"),
}
"""What is killed, and words of the cause that is told."""


async def live(replica, deaths, follower_host) -> None:
    keeping = asyncio.create_task(replica.keep())
    try:
        for what, (victim, words) in FAULTS.items():
            before = [engines(0)[0], engines(1)[0]]
            os.kill(victim().pid, signal.SIGKILL)
            cause = await asyncio.wait_for(deaths.get(), WAIT_S)
            assert words.format(host=follower_host) in cause
            _, alive = await asyncio.to_thread(psutil.wait_procs, before, timeout=WAIT_S)
            assert not alive, f"{what} died, and {alive} of its instance lives on"
            await asyncio.wait_for(replica.until_up(), WAIT_S)
            assert [len(engines(rank)) for rank in (0, 1)] == [1, 1]
    finally:
        await end_tasks([keeping], 10)
    await asyncio.wait_for(replica.handle.stop.remote(), WAIT_S)


async def begin_and_live(places, engine_python, log_folder) -> None:
    addresses, deaths = Addresses(), asyncio.Queue()
    replica = KeptReplica(
        "engine replica 0",
        maker(places, engine_python, log_folder),
        moved=addresses.move,
        parameter_server=ParameterServer(None),  # nothing was pushed
        sync_s=WAIT_S,
        stuck_after_s=WAIT_S,
        num_nodes=2,
        limits=KeptLimits(restarts=RestartLimit(max_restarts=9, window_s=3600), startup_s=WAIT_S, silent_after_s=30),
        died=lambda name, cause: deaths.put_nowait(cause),
        note=print,
    )
    url = await asyncio.wait_for(replica.start(), WAIT_S)
    addresses.set(Endpoints(generate_urls=[url]))
    await replica.ready()
    (follower,) = places.followers(Role.REPLICA, 0)
    await live(replica, deaths, follower.host)
    assert replica.url == url


def test_what_of_an_instance_over_nodes_dies_takes_all_of_it_along_and_all_is_made_anew(tmp_path):
    with two_nodes() as nodes:
        ray.init(address=nodes.address, log_to_driver=False)
        try:
            places = places_of_one_instance()
            asyncio.run(begin_and_live(places, stand_in(tmp_path), tmp_path))
            assert not engines(0) and not engines(1)

            (follower,) = places.followers(Role.REPLICA, 0)
            failing = maker(places, stand_in(tmp_path, first=FOLLOWER_FAILS), tmp_path)(0)
            with pytest.raises(ProcessDiedError, match=f"(?s){follower.host} ended with 3 at its start; last words: .*no room for weights"):
                asyncio.run(answer_of("start", failing.start.remote(), WAIT_S))
            sleeping = [process for process in psutil.Process().children(recursive=True) if process.name() == "sleep"]
            assert not psutil.wait_procs(sleeping, timeout=10)[1]  # the first node waits for nobody
        finally:
            ray.shutdown()
