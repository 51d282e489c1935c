"""Which process goes to which node."""

import pytest
from config_files import write_recipe
from hypothesis import given
from hypothesis import strategies as st

from psrl.config.load import RECIPES_FOLDER, Purpose, load_config
from psrl.config.machine import Machine
from psrl.config.nodes import Node
from psrl.config.placement import Demand, Role, place, spans_of
from psrl.config.plan_of_nodes import check_as_described, described_nodes, make_plan_of_nodes
from psrl.errors import ConfigError

GIB = 2**30
VLLM = ("gen_actor_rollout_ref.rollout.name=vllm",)
TENSOR = "gen_actor_rollout_ref.rollout.tensor_model_parallel_size"


def node(name="node", *, cpus=64, gpus=0, memory_gib=512):
    return Node(name=name, machine=Machine(num_cores=cpus, memory_bytes=memory_gib * GIB, num_gpus=gpus), num_cpus=cpus)


def demand(*, ranks=1, rank_gpus=0, instances=(0,), spans=(), workers=1, units=1, share="auto", has_gateway=False):
    return Demand(
        num_ranks=ranks,
        rank_gpus=rank_gpus,
        instance_gpus=tuple(instances),
        instance_nodes=tuple(spans),
        num_agent_workers=workers,
        num_storage_units=units,
        has_gateway=has_gateway,
        share_gpus=share,
    )


def test_on_one_node_everything_is_there():
    placement = place(demand(ranks=2, instances=(0, 0), workers=3, has_gateway=True), [node()])
    assert not placement.spans_nodes
    assert placement.lines() == [
        "node: driver, train worker 0-1, parameter server, TransferQueue storage, engine replica 0-1, agent worker 0-2, gateway"
    ]


def test_ranks_lie_on_as_few_nodes_as_possible():
    nodes = [node("head", gpus=2), node("small", gpus=4), node("large", gpus=8)]
    assert place(demand(ranks=2, rank_gpus=1), nodes).places[Role.TRAIN_WORKER] == (0, 0)
    assert place(demand(ranks=3, rank_gpus=1), nodes).places[Role.TRAIN_WORKER] == (1, 1, 1)
    assert place(demand(ranks=8, rank_gpus=1), nodes).places[Role.TRAIN_WORKER] == (2,) * 8
    # Ten need two nodes: the largest, and the driver's for the two that are left.
    assert place(demand(ranks=10, rank_gpus=1), nodes).places[Role.TRAIN_WORKER] == (2,) * 8 + (0,) * 2


def test_what_ranks_talk_to_lies_beside_rank_0_and_agent_workers_beside_replicas():
    nodes = [node("head"), node("a", gpus=8), node("b", gpus=8)]
    placement = place(demand(ranks=8, rank_gpus=1, instances=(4, 2, 2), workers=3, units=2, has_gateway=True), nodes)
    assert placement.places == {
        Role.TRAIN_WORKER: (1,) * 8,
        Role.PARAMETER_SERVER: (1,),
        Role.STORAGE: (1, 1),
        Role.REPLICA: (2, 2, 2),
        Role.VALIDATION_REPLICA: (),
        Role.FOLLOWER: (),
        Role.AGENT_WORKER: (2, 2, 2),
        Role.GATEWAY: (0,),
    }


def test_agent_workers_are_shared_out_as_the_replicas_are():
    nodes = [node("head", gpus=8), node("a", gpus=4), node("b", gpus=2)]
    placement = place(demand(ranks=8, rank_gpus=1, instances=(1,) * 6, workers=3), nodes)
    assert placement.places[Role.REPLICA] == (2, 2, 1, 1, 1, 1)
    assert placement.places[Role.AGENT_WORKER] == (1, 2, 1)


def test_large_instances_find_room_before_small_ones():
    nodes = [node("head", gpus=4), node("a", gpus=4)]
    placement = place(demand(ranks=1, rank_gpus=1, instances=(1, 1, 4)), nodes)
    assert placement.places[Role.REPLICA] == (0, 0, 1)


def test_without_gpus_replicas_go_where_the_fewest_compute():
    assert place(demand(instances=(0, 0, 0), workers=2), [node("a"), node("b")]).places[Role.REPLICA] == (1, 0, 1)


def test_an_instance_over_nodes_has_as_many_gpus_on_each_and_serves_on_the_first():
    nodes = [node("head", gpus=2), node("a", gpus=8), node("b", gpus=8), node("c", gpus=4)]
    placement = place(demand(ranks=2, rank_gpus=1, instances=(4, 16), spans=(1, 2), workers=2), nodes)
    assert placement.places[Role.REPLICA] == (3, 1)
    assert placement.places[Role.FOLLOWER] == (2,)
    assert [placement.gpus_of(role, index) for role, index in ((Role.REPLICA, 0), (Role.REPLICA, 1), (Role.FOLLOWER, 0))] == [4, 8, 8]
    assert placement.places[Role.AGENT_WORKER] == (1, 3)
    assert placement.lines()[1:] == [
        "a: engine replica 1 on 8 GPUs, agent worker 0",
        "b: follower of engine replica 1 on 8 GPUs",
        "c: engine replica 0 on 4 GPUs, agent worker 1",
    ]
    assert placement.demand.num_cpus == 2 + 2 + 1 + 2 + 1 + 1 + 1  # ranks, replicas, follower, agents, storage, server, controller


def test_workers_on_cpus_are_divided_over_the_nodes_that_compute_least():
    placement = place(demand(instances=(0, 0), spans=(2, 1)), [node("a"), node("b"), node("c")])
    assert (placement.places[Role.REPLICA], placement.places[Role.FOLLOWER]) == ((1, 0), (2,))
    assert placement.lines()[2] == "c: follower of engine replica 0"


def test_a_single_gpu_is_shared_and_two_are_not():
    assert place(demand(rank_gpus=1, instances=(1,)), [node(gpus=1)]).shares_gpus
    assert not place(demand(rank_gpus=1, instances=(1,)), [node(gpus=2)]).shares_gpus
    assert place(demand(rank_gpus=1, instances=(1,), share="always"), [node(gpus=2)]).shares_gpus
    with pytest.raises(ConfigError, match=r"share_gpus.*need 2 GPUs, and the nodes have 1"):
        place(demand(rank_gpus=1, instances=(1,), share="never"), [node(gpus=1)])


@pytest.mark.parametrize(
    ("wanted", "nodes", "words"),
    [
        (demand(ranks=3, rank_gpus=1, instances=(2,)), [node(gpus=3)], "an instance of 2 GPUs shares none"),
        (
            demand(ranks=4, rank_gpus=1, instances=(4,)),
            [node("a", gpus=6), node("b", gpus=2)],
            "no node has 4 free GPUs.*a 2 of 6, b 2 of 2",
        ),
        (
            demand(instances=(12,), spans=(3,)),
            [node("a", gpus=8), node("b", gpus=2), node("c", gpus=4)],
            "nodes_per_instance.*no 3 nodes have 4 free GPUs.*a 4 of 8, b 2 of 2, c 0 of 4",
        ),
        (demand(ranks=9, rank_gpus=1, instances=(1,)), [node(gpus=8)], "need 9 GPUs although they share them"),
        (demand(ranks=4, instances=(0, 0)), [node(cpus=4)], "one logical CPU each.*node 4"),
    ],
    ids=["shared", "split", "too few nodes", "too many", "cpus"],
)
def test_what_finds_no_room_is_refused(wanted, nodes, words):
    with pytest.raises(ConfigError, match=words):
        place(wanted, nodes)


@given(
    ranks=st.integers(0, 12),
    instances=st.lists(st.sampled_from(((1, 1), (2, 1), (4, 1), (4, 2), (6, 3))), min_size=1, max_size=6),
    gpus=st.lists(st.integers(0, 8), min_size=1, max_size=5),
    workers=st.integers(1, 6),
)
def test_no_gpu_is_given_twice(ranks, instances, gpus, workers):
    nodes = [node(str(index), gpus=count) for index, count in enumerate(gpus)]
    try:
        sizes, spans = zip(*instances, strict=True)
        placement = place(demand(ranks=ranks, rank_gpus=1, instances=sizes, spans=spans, workers=workers, share="never"), nodes)
    except ConfigError:
        return
    for index, count in enumerate(gpus):
        used = [
            placement.gpus_of(role, process) for role, at in placement.places.items() for process, place in enumerate(at) if place == index
        ]
        assert sum(used) <= count
    followers = placement.demand.followers
    for index, (_, num_nodes) in enumerate(instances):
        others = [place for one, place in zip(followers, placement.places[Role.FOLLOWER], strict=True) if one.index == index]
        assert len({placement.places[Role.REPLICA][index], *others}) == num_nodes
    at = placement.places[Role.TRAIN_WORKER]
    # Few: without any of the nodes that have ranks, the others of them would not do.
    assert all(sum(gpus[node] for node in set(at) - {without}) < ranks for without in set(at))


def described(tmp_path, *overrides):
    settings = ("psrl.ray_address=auto", "psrl.deployment.cores_per_node=[64]", "psrl.deployment.memory_gib_per_node=[512]")
    return load_config(str(write_recipe(tmp_path)), [*settings, *overrides], purpose=Purpose.DRY_RUN)


def test_replicas_of_validation_come_beside_those_of_training(tmp_path):
    config = described(
        tmp_path, "psrl.deployment.num_nodes=1", "psrl.deployment.gpus_per_node=[4]", "psrl.deployment.num_validation_instances=1"
    )
    plan = make_plan_of_nodes(config, described_nodes(config))
    assert "engine replica on 1 GPU, validation replica on 1 GPU" in plan.placement.lines()[0]
    assert next(row.count for row in plan.plans["node 0"].processes if row.role == "torch engine") == 2
    with pytest.raises(ConfigError, match=r"num_validation_instances.*has no effect behind the gateway"):
        described(tmp_path, "psrl.deployment.num_nodes=1", "psrl.deployment.num_validation_instances=1", "psrl.rollout_gateway.enable=true")


OVER_TWO = (*VLLM, "psrl.deployment.num_nodes=2", "psrl.deployment.nodes_per_instance=[2]")


def test_the_plan_of_a_node_has_its_part_of_an_instance(tmp_path):
    config = described(tmp_path, *OVER_TWO, "psrl.deployment.gpus_per_node=[8]", "psrl.deployment.gpus_per_instance=[8]")
    plan = make_plan_of_nodes(config, described_nodes(config))
    assert plan.placement.lines()[1] == "node 1: follower of engine replica on 4 GPUs"
    assert [row.count for each in plan.plans.values() for row in each.processes if row.role == "vllm engine"] == [1, 1]
    # The other node has a follower alone, and maps the weights there.
    assert "weights" in [row.role for row in plan.plans["node 1"].processes]


def test_on_cpus_each_node_of_an_instance_has_one_worker(tmp_path):
    config = described(tmp_path, *OVER_TWO, f"{TENSOR}=4")
    with pytest.raises(ConfigError, match=r"nodes_per_instance=\[2\].*has 2 for 4 workers, and vLLM's CPU build cannot start"):
        make_plan_of_nodes(config, described_nodes(config))
    config = described(tmp_path, *OVER_TWO, "gen_actor_rollout_ref.rollout.pipeline_model_parallel_size=2")
    plan = make_plan_of_nodes(config, described_nodes(config))
    assert [row.num_cores for each in plan.plans.values() for row in each.processes if row.role == "vllm engine"] == [32, 32]


def test_described_nodes_need_no_model_here(tmp_path):
    config = described(tmp_path, "psrl.deployment.num_nodes=2", "psrl.deployment.gpus_per_node=[8,4]", "data.train_files=[/not/here.jsonl]")
    nodes = described_nodes(config)
    assert [each.machine.num_gpus for each in nodes] == [8, 4]
    plan = make_plan_of_nodes(config, nodes)
    assert plan.placement.gpus_of(Role.REPLICA, 0) == 1


def test_a_node_that_cannot_hold_its_part_is_named(tmp_path):
    config = described(
        tmp_path, "psrl.deployment.num_nodes=2", "psrl.deployment.num_instances=2", "psrl.deployment.memory_gib_per_node=[64,1]"
    )
    with pytest.raises(ConfigError, match="node 1: the plan needs"):
        make_plan_of_nodes(config, described_nodes(config))


def test_a_cluster_must_have_the_nodes_that_are_described(tmp_path):
    config = described(tmp_path, "psrl.deployment.num_nodes=2", "psrl.deployment.gpus_per_node=[8]")
    check_as_described(config, [node("a", gpus=8), node("b", gpus=8), node("c")])
    with pytest.raises(ConfigError, match="describes a node of 8 GPUs and 64 cores that the cluster has not"):
        check_as_described(config, [node("a", gpus=8), node("b", gpus=4)])


def test_the_number_of_instances_is_said_once(tmp_path):
    replicas = "gen_actor_rollout_ref.rollout.num_replicas"
    for said in ("psrl.deployment.num_instances=3", "psrl.deployment.gpus_per_instance=[1,1,1]"):
        config = load_config(str(write_recipe(tmp_path)), [said])
        assert config.gen_actor_rollout_ref.rollout.num_replicas == config.train_actor_rollout_ref.rollout.num_replicas == 3
    assert load_config(str(write_recipe(tmp_path)), [f"{replicas}=3", "psrl.deployment.num_instances=3"])
    with pytest.raises(ConfigError, match=rf"num_instances=3: says 3 instances, and {replicas} says 2"):
        load_config(str(write_recipe(tmp_path)), [f"{replicas}=2", "psrl.deployment.num_instances=3"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["psrl.deployment.gpus_per_instance=[1,1]", "psrl.deployment.num_instances=3"], "has 2 numbers, and there are 3 instances"),
        (["psrl.deployment.gpus_per_instance=[2]"], "the torch engine has one GPU at most"),
        (["psrl.deployment.gpus_per_instance=[0]"], "no positive multiple"),
        (["psrl.deployment.nodes_per_instance=[2]"], "nodes_per_instance.*has 2, and the torch engine is one process"),
        (["psrl.deployment.nodes_per_instance=[1,1]"], "has 2 numbers, and there are 1 instances"),
        ([*VLLM, "psrl.deployment.nodes_per_instance=[2]"], "has 2, over which 1 workers of an instance .* do not divide"),
        ([*VLLM, "psrl.deployment.nodes_per_instance=[0]"], "has 0, over which"),
        ([*VLLM, f"{TENSOR}=2", "psrl.deployment.nodes_per_instance=[2]"], "psrl.ray_address=local starts Ray"),
        (
            [*VLLM, "gen_actor_rollout_ref.rollout.data_parallel_size=2", "psrl.deployment.nodes_per_instance=[2]"],
            "data_parallel_size=2 copies of the model need no instance over several nodes",
        ),
        (["psrl.deployment.cores_per_node=[8]"], "has no effect while psrl.deployment.num_nodes=0"),
        (["psrl.deployment.num_nodes=2"], "psrl.ray_address=local starts Ray"),
        (["psrl.deployment.num_nodes=1"], "cores_per_node.*must be said"),
        (["psrl.deployment.share_gpus=sometimes"], "is no choice"),
        (["psrl.deployment.gpus_per_node=[a]"], "must be a list of whole numbers"),
    ],
)
def test_what_deployment_says_wrongly_is_refused(tmp_path, overrides, words):
    with pytest.raises(ConfigError, match=words):
        load_config(str(write_recipe(tmp_path)), overrides)


def test_numbers_are_written_as_spans():
    assert spans_of([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"


CLUSTERS = {
    "1_gpu": [
        "node 0: driver, train worker on 1 shared GPU, parameter server, TransferQueue storage, engine replica on 1 shared GPU, "
        "agent worker 0-1"
    ],
    "8_gpus": [
        "node 0: driver, train worker 0-3 on 4 GPUs, parameter server, TransferQueue storage, engine replica 0-3 on 4 GPUs, "
        "agent worker 0-3"
    ],
    "16_gpus": [
        "node 0: driver, train worker 0-7 on 8 GPUs, parameter server, TransferQueue storage 0-1",
        "node 1: engine replica 0-7 on 8 GPUs, agent worker 0-7",
    ],
    "64_gpus": [
        "node 0: driver, train worker 0-7 on 8 GPUs, parameter server, TransferQueue storage 0-3",
        *(f"node {node}: train worker {8 * node}-{8 * node + 7} on 8 GPUs" for node in (1, 2, 3)),
        *(f"node {4 + n}: engine replica {2 * n}-{2 * n + 1} on 8 GPUs, agent worker {n}, {n + 4}, {n + 8}, {n + 12}" for n in range(4)),
    ],
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_shipped_clusters_can_be_planned_anywhere(name):
    config = load_config(str(RECIPES_FOLDER / "retool" / "clusters" / f"{name}.yaml"), purpose=Purpose.DRY_RUN)
    assert make_plan_of_nodes(config, described_nodes(config)).placement.lines() == CLUSTERS[name]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.num_workers=1"], "train worker .* do not fit on a card of 80 GiB"),
        (["gen_actor_rollout_ref.rollout.gpu_memory_utilization=0.1"], "less than the weights of an instance take"),
        (["psrl.deployment.num_instances=5"], "need 9 GPUs although they share them|need 9 GPUs, and the nodes have 8"),
    ],
    ids=["states", "weights", "GPUs"],
)
def test_what_does_not_fit_on_its_card_is_refused(overrides, words):
    config = load_config(
        str(RECIPES_FOLDER / "retool" / "clusters" / "8_gpus.yaml"),
        [*overrides, "psrl.deployment.share_gpus=never"],
        purpose=Purpose.DRY_RUN,
    )
    with pytest.raises(ConfigError, match=words):
        make_plan_of_nodes(config, described_nodes(config))
