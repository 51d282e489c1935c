"""Where processes listen, and where they go when their node is lost."""

import os

import pytest
import ray

from psrl.config.machine import Machine
from psrl.config.nodes import Node
from psrl.config.placement import Demand, Role, place
from psrl.errors import ConfigError, ProcessDiedError
from psrl.runtime.build import is_near
from psrl.runtime.placement import LOOPBACK, Places, RayNode, interface_of
from psrl.runtime.startup import check_seen

NODE_ID = "{:056x}"
"""As Ray writes it."""


def node(name: str, *, cpus: int, gpus: int = 0) -> Node:
    return Node(name=name, machine=Machine(num_cores=cpus, memory_bytes=2**34, num_gpus=gpus), num_cpus=cpus)


def demand(**changes) -> Demand:
    settings = {"num_ranks": 1, "rank_gpus": 0, "instance_gpus": (0, 0), "num_agent_workers": 2, "num_storage_units": 1}
    return Demand(**{**settings, "has_gateway": False, "share_gpus": "auto", **changes})


def places_of(nodes: list[Node], wanted: Demand, *, network: str = "10.0.0.") -> tuple[Places, list[bool]]:
    """Places of nodes at addresses of one network, and who of them lives."""
    alive = [True] * len(nodes)
    ray_nodes = [RayNode(id=NODE_ID.format(index + 1), address=f"{network}{index + 1}", port=1) for index, each in enumerate(nodes)]
    return Places(place(wanted, nodes), ray_nodes, alive=lambda _: list(alive)), alive


def test_on_one_node_servers_listen_on_loopback():
    places, _ = places_of([node("a", cpus=16)], demand(), network="192.0.2.")
    assert places.host(Role.REPLICA, 0) == LOOPBACK
    assert places.storage_resource is None
    assert not places.settle(Role.REPLICA, 0)


def test_on_several_nodes_servers_listen_on_their_nodes_addresses():
    places, _ = places_of([node("a", cpus=16), node("b", cpus=16)], demand())
    assert [places.host(Role.REPLICA, index) for index in (0, 1)] == ["10.0.0.2", "10.0.0.1"]
    assert (places.anchor, places.storage_resource) == ("10.0.0.1", "node:10.0.0.1")


def test_a_public_address_is_refused():
    with pytest.raises(ConfigError, match=r"8\.8\.8\.1 *: is a public address|8\.8\.8\.1.*public"):
        places_of([node("a", cpus=16), node("b", cpus=16)], demand(), network="8.8.8.")


def test_what_is_started_again_stays_while_its_node_lives_and_goes_to_another_when_it_is_lost():
    places, alive = places_of([node("a", cpus=16), node("b", cpus=16), node("c", cpus=16)], demand())
    assert [places.address(Role.REPLICA, index) for index in (0, 1)] == ["10.0.0.2", "10.0.0.3"]
    assert [places.address(Role.AGENT_WORKER, index) for index in (0, 1)] == ["10.0.0.2", "10.0.0.3"]
    assert not places.settle(Role.REPLICA, 0)
    alive[1] = False
    assert places.settle(Role.REPLICA, 0)
    assert places.settle(Role.AGENT_WORKER, 0)
    # The first node has a rank, the third a replica: one computing process each, so the first of them.
    assert places.address(Role.REPLICA, 0) == places.address(Role.AGENT_WORKER, 0) == "10.0.0.1"
    assert not places.settle(Role.REPLICA, 0)
    assert places.lines()[0].startswith(
        "a: driver, train worker, parameter server, TransferQueue storage, engine replica 0, agent worker 0"
    )


def test_a_replica_over_nodes_is_placed_anew_as_a_whole_where_one_of_them_is_lost():
    nodes = [node("a", cpus=16, gpus=2), node("b", cpus=16, gpus=2), node("c", cpus=16, gpus=2)]
    places, alive = places_of(nodes, demand(num_ranks=0, instance_gpus=(4, 1), instance_nodes=(2, 1)))
    assert places.addresses(Role.REPLICA, 0) == ["10.0.0.1", "10.0.0.2"]
    (follower,) = places.followers(Role.REPLICA, 0)
    assert (follower.host, follower.options["num_gpus"], follower.options["scheduling_strategy"].node_id) == (
        "10.0.0.2",
        2,
        NODE_ID.format(2),
    )
    assert places.followers(Role.REPLICA, 1) == []
    assert (places.num_nodes(Role.REPLICA, 0), places.num_nodes(Role.REPLICA, 1)) == (2, 1)
    assert not places.settle(Role.REPLICA, 0)
    alive[1] = False
    with pytest.raises(
        ProcessDiedError, match=r"node 10\.0\.0\.2 of engine replica 0 is lost.*no 2 nodes have 2 free GPUs.*a 0 of 2, b 0 of 0, c 1 of 2"
    ):
        places.settle(Role.REPLICA, 0)


def test_a_replica_over_nodes_goes_where_there_is_room_for_all_of_it():
    places, alive = places_of([node(name, cpus=16) for name in "abcd"], demand(instance_gpus=(0,), instance_nodes=(2,)))
    assert places.addresses(Role.REPLICA, 0) == ["10.0.0.2", "10.0.0.3"]
    alive[2] = False
    assert places.settle(Role.REPLICA, 0)
    assert places.addresses(Role.REPLICA, 0) == ["10.0.0.2", "10.0.0.4"]
    assert places.threads(Role.REPLICA, 0) == places.threads(Role.FOLLOWER, 0) == 16


def test_a_replica_finds_no_room_where_gpus_are_taken():
    nodes = [node("a", cpus=16, gpus=1), node("b", cpus=16, gpus=2), node("c", cpus=16, gpus=1)]
    places, alive = places_of(nodes, demand(rank_gpus=1, instance_gpus=(2, 1)))
    assert [places.address(Role.REPLICA, index) for index in (0, 1)] == ["10.0.0.2", "10.0.0.3"]
    alive[1] = False
    with pytest.raises(
        ProcessDiedError, match=r"node 10\.0\.0\.2 of engine replica 0 is lost, and no other has room.*a 0 of 1, b 0 of 0, c 0 of 1"
    ):
        places.settle(Role.REPLICA, 0)


def test_a_shared_gpu_takes_its_replica_again():
    nodes = [node("a", cpus=16, gpus=2), node("b", cpus=16, gpus=1)]
    places, alive = places_of(nodes, demand(num_ranks=2, rank_gpus=1, instance_gpus=(1,), share_gpus="always"))
    assert places.address(Role.REPLICA, 0) == "10.0.0.2"
    assert places.options(Role.REPLICA, 0)["num_gpus"] == 1  # both ranks are on the other node
    alive[1] = False
    assert places.settle(Role.REPLICA, 0)
    assert places.address(Role.REPLICA, 0) == "10.0.0.1"
    assert places.options(Role.REPLICA, 0)["num_gpus"] == 0.4


def test_where_gpus_are_shared_two_ranks_ask_for_more_than_one_gpu_has():
    places, _ = places_of([node("a", cpus=16, gpus=3)], demand(num_ranks=2, rank_gpus=1, instance_gpus=(1, 1), validation_gpus=(1,)))
    assert [places.options(Role.TRAIN_WORKER, rank)["num_gpus"] for rank in (0, 1)] == [0.6, 0.6]
    assert [places.options(Role.REPLICA, index)["num_gpus"] for index in (0, 1)] == [0.4, 0.4]
    assert places.options(Role.VALIDATION_REPLICA, 0)["num_gpus"] == 1  # the third card has no rank
    assert places.options(Role.AGENT_WORKER, 0)["num_gpus"] == 0


@ray.remote(num_cpus=0)
class OnGpu:
    def gpus(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]


@pytest.mark.slow
def test_ray_gives_no_two_ranks_and_no_two_replicas_one_gpu():
    """Ray's own bookkeeping of three GPUs, which need not be there."""
    ray.init(address="local", num_cpus=1, num_gpus=3, include_dashboard=False, log_to_driver=False)
    try:
        here = ray.get_runtime_context().get_node_id()
        wanted = demand(num_ranks=2, rank_gpus=1, instance_gpus=(1, 1, 1), share_gpus="always")
        places = Places(place(wanted, [node("a", cpus=16, gpus=3)]), [RayNode(id=here, address=LOOPBACK, port=1)])
        actors = [
            [OnGpu.options(**places.options(role, index)).remote() for index in range(places.count(role))]
            for role in (Role.TRAIN_WORKER, Role.REPLICA)
        ]
        given = [ray.get([actor.gpus.remote() for actor in each], timeout=60) for each in actors]
    finally:
        ray.shutdown()
    assert [len(set(each)) for each in given] == [2, 3]


def test_threads_are_shared_on_a_node_and_not_over_the_run():
    places, _ = places_of([node("a", cpus=8), node("b", cpus=32)], demand(instance_gpus=(0, 0, 0)))
    assert [places.address(Role.REPLICA, index)[-1] for index in range(3)] == ["2", "2", "2"]
    assert places.threads(Role.REPLICA, 0) == 32 // 3
    assert places.threads(Role.TRAIN_WORKER, 0) == 8


def test_an_interface_is_found_by_its_address():
    assert interface_of(LOOPBACK) is not None
    assert interface_of("203.0.113.77") is None


def test_an_agent_worker_is_near_the_instances_of_its_node():
    places, _ = places_of([node("a", cpus=16), node("b", cpus=16)], demand(validation_gpus=(0,)))
    assert [places.address(Role.AGENT_WORKER, worker)[-1] for worker in (0, 1)] == ["2", "1"]
    near = is_near(places, is_behind_smg=False)
    assert [near(worker, 0, False) for worker in (0, 1)] == [True, False]
    assert [near(worker, 1, False) for worker in (0, 1)] == [False, True]
    on = places.address(Role.VALIDATION_REPLICA, 0)
    assert [near(worker, 0, True) for worker in (0, 1)] == [places.address(Role.AGENT_WORKER, worker) == on for worker in (0, 1)]
    assert is_near(places, is_behind_smg=True)(0, 1, False)


def test_a_rank_that_does_not_see_the_run_folder_is_named(tmp_path):
    places, _ = places_of([node("a", cpus=8), node("b", cpus=16)], demand(num_ranks=8))
    check_seen(tmp_path, [True] * 8, places)
    with pytest.raises(ConfigError, match=r"default_local_dir.*is not on 10\.0\.0\.2, where train worker 7"):
        check_seen(tmp_path, [True] * 7 + [False], places)
