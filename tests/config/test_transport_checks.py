"""Ways of weights to other nodes that have no effect or cannot work, and what NCCL takes of the cards."""

import pytest
from config_files import write_recipe

from psrl.config.load import RECIPES_FOLDER, Purpose, load_config
from psrl.config.plan_of_cards import CUDA_CONTEXT_BYTES, NCCL_BYTES, STAGING_BYTES
from psrl.config.plan_of_nodes import described_nodes, make_plan_of_nodes
from psrl.errors import ConfigError
from psrl.parameter_server.transports.nccl import CHUNK_BYTES, NUM_BUFFERS


def plan_of(cluster, *overrides):
    path = RECIPES_FOLDER / "retool" / "clusters" / f"{cluster}.yaml"
    config = load_config(str(path), list(overrides), purpose=Purpose.DRY_RUN)
    return make_plan_of_nodes(config, described_nodes(config))


def gpu_bytes_of(plan, node, role):
    return next(row.gpu_bytes for row in plan.plans[node].processes if row.role == role)


def test_the_plan_has_nccls_buffers_on_both_sides_and_nothing_of_them_without_it():
    assert STAGING_BYTES == NUM_BUFFERS * CHUNK_BYTES
    without, with_nccl = plan_of("64_gpus"), plan_of("64_gpus", "psrl.ps_mode=nccl")
    assert gpu_bytes_of(without, "node 4", "weights") == 0
    assert gpu_bytes_of(with_nccl, "node 4", "weights") == CUDA_CONTEXT_BYTES + STAGING_BYTES + NCCL_BYTES
    # Rank 0 sends to four nodes with engines; nodes 1 to 3 have ranks that send nothing.
    sent = [gpu_bytes_of(with_nccl, f"node {n}", "train worker") - gpu_bytes_of(without, f"node {n}", "train worker") for n in (0, 1)]
    assert sent == [4 * (STAGING_BYTES + NCCL_BYTES), 0]


@pytest.mark.parametrize("ps_mode", ["nixl_cpu", "nccl"])
def test_a_mode_that_reaches_no_other_node_is_refused(ps_mode):
    with pytest.raises(ConfigError, match=rf"psrl\.ps_mode='{ps_mode}': has no effect while all engines are on the trainer's node"):
        plan_of("8_gpus", f"psrl.ps_mode={ps_mode}", "psrl.ray_address=auto")


def test_nodes_without_gpus_are_refused_for_nccl_and_may_use_the_other_modes(tmp_path):
    nodes = ("num_nodes=2", "num_instances=3", "cores_per_node=[64]", "memory_gib_per_node=[512]")
    overrides = ["psrl.ray_address=auto", *(f"psrl.deployment.{each}" for each in nodes)]

    def plan(*others):
        config = load_config(str(write_recipe(tmp_path)), [*overrides, *others], purpose=Purpose.DRY_RUN)
        return make_plan_of_nodes(config, described_nodes(config))

    with pytest.raises(ConfigError, match=r"psrl\.ps_mode='nccl'.*the trainer would be on CPUs.*psrl\.ps_mode=nixl_cpu"):
        plan("psrl.ps_mode=nccl")
    assert gpu_bytes_of(plan("psrl.ps_mode=nixl_cpu"), "node 1", "weights") == 0


def test_engines_that_leave_no_room_on_their_cards_are_refused_with_both_ways_out():
    share = "gen_actor_rollout_ref.rollout.gpu_memory_utilization=0.95"
    assert plan_of("16_gpus", share)
    with pytest.raises(
        ConfigError, match=r"psrl\.ps_mode='nccl': node 1: needs 0\.9 GiB beside vllm engine.*cpu_ref, or lower .*utilization"
    ):
        plan_of("16_gpus", share, "psrl.ps_mode=nccl")
