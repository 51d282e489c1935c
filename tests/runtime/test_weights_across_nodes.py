"""Weights on a node that cannot map the trainer's memory: two raylets on this machine stand for two nodes."""

import os
from contextlib import contextmanager

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from psrl.runtime.actors.parameter_server import ParameterServerActor
from tests.engines.tiny_models import save_tiny_qwen3
from tests.runtime.weight_kit import WAIT_S, engines, mapped_versions, replica_actor, train_worker, wait

pytestmark = pytest.mark.slow
CARDS = "CUDA_VISIBLE_DEVICES"


@contextmanager
def two_nodes(**there):
    """Options of an actor on this one, and on the other; `there` says what that has beside CPUs."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        other = cluster.add_node(num_cpus=4, **there)
        cluster.wait_for_nodes()
        ids = (ray.get_runtime_context().get_node_id(), other.node_id)
        yield tuple({"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)} for node in ids)
    finally:
        ray.shutdown()
        cluster.shutdown()


def holders() -> list[psutil.Process]:
    """Of weights on other nodes."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if "ray::NodeWeightsActor" in " ".join(process.cmdline())]


@pytest.mark.parametrize("ps_mode", ["cpu_ref", "nixl_cpu", "nccl"])
def test_another_node_gets_one_copy_for_all_its_replicas(tmp_path, ps_mode):
    folder = save_tiny_qwen3(tmp_path / "model", seed=1)
    with two_nodes() as (here, there):
        server = ParameterServerActor.remote(num_kept=2)
        replicas = [replica_actor(folder, tmp_path, 0, **here), *(replica_actor(folder, tmp_path, n, **there) for n in (1, 2))]
        worker = train_worker(folder, ps_mode=ps_mode, **here)
        wait([replica.start.remote() for replica in replicas])
        for version in (1, 2, 3):
            manifest = wait(worker.push.remote(server, version))
            results = wait([replica.sync.remote(server, version) for replica in replicas])
            assert {result.report.checksum for result in results} == {manifest.checksum}
            assert [result.brought.num_bytes for result in results].count(0) == 2
            assert sum(result.brought.num_bytes for result in results) == manifest.total_bytes
            inodes = [inode for process in engines() for inode in mapped_versions(process.pid)[f"psrl-weights-{version}"]]
            assert (len(inodes), len(set(inodes))) == (3, 2)
        wait([replica.stop.remote() for replica in replicas])


def test_with_nccl_either_side_may_die_between_versions_and_the_next_one_arrives(tmp_path):
    folder = save_tiny_qwen3(tmp_path / "model", seed=1)
    with two_nodes(num_gpus=2) as (here, there):  # GPUs that Ray gives out and nobody uses
        server = ParameterServerActor.remote(num_kept=2)
        first, second = (replica_actor(folder, tmp_path, n, num_gpus=1, **there) for n in (1, 2))
        worker = train_worker(folder, ps_mode="nccl", **here)

        def brought_to(replica, version):
            manifest = wait(worker.push.remote(server, version))
            return wait(replica.sync.remote(server, version)).report.checksum == manifest.checksum

        wait(first.start.remote())
        (engine,) = engines()
        assert brought_to(first, 1)
        (holder,) = holders()
        assert holder.environ()[CARDS] == engine.environ()[CARDS]
        end_actor(worker)
        worker = train_worker(folder, ps_mode="nccl", **here)
        assert brought_to(first, 2), "over a new group: the other side of the old one is gone"
        assert holders() == [holder]
        wait(second.start.remote())
        (engine,) = [process for process in engines() if process != engine]
        holder.kill()
        holder.wait(WAIT_S)
        assert brought_to(second, 3)
        (holder,) = holders()
        assert holder.environ()[CARDS] == engine.environ()[CARDS]
        wait([first.stop.remote(), second.stop.remote()])


def end_actor(actor):
    """And wait until its process is gone."""
    pid = wait(actor.__ray_call__.remote(lambda _: os.getpid()))
    process = psutil.Process(pid)
    ray.kill(actor)
    process.wait(WAIT_S)
