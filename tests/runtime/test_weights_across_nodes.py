"""Weights on a node that cannot map the trainer's memory: two raylets on this machine stand for two nodes."""

import importlib.util

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from psrl.parameter_server.transports.nixl_cpu import MODULES as NIXL_MODULES
from psrl.runtime.actors.parameter_server import ParameterServerActor
from tests.engines.tiny_models import save_tiny_qwen3
from tests.runtime.weight_kit import engines, mapped_versions, replica_actor, train_worker, wait

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("ps_mode", ["cpu_ref", "nixl_cpu", "nccl"])
def test_another_node_gets_one_copy_for_all_its_replicas(tmp_path, ps_mode):
    if ps_mode == "nixl_cpu" and not any(importlib.util.find_spec(name.partition(".")[0]) for name in NIXL_MODULES):
        pytest.skip("NIXL is not installed")
    folder = save_tiny_qwen3(tmp_path / "model", seed=1)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        other = cluster.add_node(num_cpus=4)
        cluster.wait_for_nodes()
        there = {"scheduling_strategy": NodeAffinitySchedulingStrategy(other.node_id, soft=False)}
        here = {"scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)}
        server = ParameterServerActor.remote(num_kept=2)
        replicas = [replica_actor(folder, tmp_path, 0, **here), *(replica_actor(folder, tmp_path, n, **there) for n in (1, 2))]
        worker = train_worker(folder, ps_mode=ps_mode, **here)
        wait([replica.start.remote() for replica in replicas])
        for version in (1, 2, 3):
            manifest = wait(worker.push.remote(server, version))
            results = wait([replica.sync.remote(server, version) for replica in replicas])
            assert {result.report.checksum for result in results} == {manifest.checksum}
            inodes = [inode for process in engines() for inode in mapped_versions(process.pid)[f"psrl-weights-{version}"]]
            assert (len(inodes), len(set(inodes))) == (3, 2)
        wait([replica.stop.remote() for replica in replicas])
    finally:
        ray.shutdown()
        cluster.shutdown()
