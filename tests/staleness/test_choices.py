"""Routers, sync policies and filters, each by hand."""

import random
from collections import Counter

import pytest
from staleness_kit import view

from psrl.config.asynchrony import ProactiveFilterConfig, SyncConfig
from psrl.errors import TooManyFailuresError
from psrl.staleness import DynamicSampling, InstanceLoad, ProactiveFilter, has_signal
from psrl.staleness.admission import within_share
from psrl.staleness.routing import CACHE_BLOCK_CHARACTERS, CACHE_BLOCKS_PER_INSTANCE, prefix_hashes, routers
from psrl.staleness.sync_policy import sync_policies


def choices(policy: str, views, *, prompts=("",) * 6, key="g") -> list[int]:
    router, rng = routers.resolve(policy)(), random.Random(1)
    return [router.choose(views, key=key, prompt=prompt, rng=rng) for prompt in prompts]


# -- routers


def test_random_routing_chooses_all_that_may_be_chosen_and_depends_on_the_seed_only():
    views = [view(1), view(4), view(6)]
    chosen = choices("random", views, prompts=[""] * 300)
    assert chosen == choices("random", views, prompts=[""] * 300)
    assert all(count > 60 for count in Counter(chosen).values()) and set(chosen) == {1, 4, 6}


def test_round_robin_goes_on_after_an_instance_that_may_not_be_chosen():
    router, rng = routers.resolve("round_robin")(), random.Random(1)
    choose = lambda *indices: router.choose([view(index) for index in indices], key="g", prompt="", rng=rng)  # noqa: E731
    assert [choose(0, 1, 2), choose(0, 2), choose(0, 1, 2), choose(1, 2), choose(1), choose(0, 1, 2)] == [0, 2, 0, 1, 1, 2]


def test_balance_chooses_the_fewest_episodes_and_of_equal_ones_the_first():
    assert choices("request_num_balance", [view(0, episodes=3), view(1, episodes=2), view(2, episodes=2)])[0] == 1


def test_cache_aware_routing_goes_where_the_prompt_is_known():
    system = "You are a careful assistant. " * 20
    views = [view(0), view(1)]
    router, rng = routers.resolve("cache_aware")(), random.Random(1)
    choose = lambda prompt: router.choose(views, key="g", prompt=prompt, rng=rng)  # noqa: E731
    assert choose(system + "1 + 1?") == 0
    views[0].num_episodes = 1
    assert choose("Something else entirely") == 1
    views[1].num_episodes = 1
    views[1].num_episodes = 0
    assert choose(system + "2 + 2?") == 0, "one episode more than the least loaded is worth the cached prompt"
    views[0].num_episodes = 2
    assert choose(system + "3 + 3?") == 1, "two more are not"
    router.forget(0), router.forget(1)
    views[1].num_episodes = 5
    assert choose(system + "2 + 2?") == 0


def test_cache_aware_routing_forgets_what_was_used_least_recently():
    router, rng = routers.resolve("cache_aware")(), random.Random(1)
    views = [view(0), view(1)]
    long = "".join(f"{number:0{CACHE_BLOCK_CHARACTERS}}" for number in range(CACHE_BLOCKS_PER_INSTANCE))
    router.choose(views[:1], key="g", prompt="first", rng=rng)
    router.choose(views[:1], key="g", prompt=long, rng=rng)
    views[0].num_episodes = 1
    assert router.choose(views, key="g", prompt="first", rng=rng) == 1
    assert router.choose(views, key="g", prompt=long, rng=rng) == 0


def test_without_a_prompt_the_episodes_of_a_group_go_together():
    views = [view(0), view(1)]
    router, rng = routers.resolve("cache_aware")(), random.Random(1)
    first = router.choose(views, key="a", prompt="", rng=rng)
    views[first].num_episodes += 1
    assert router.choose(views, key="a", prompt="", rng=rng) == first
    assert router.choose(views, key="b", prompt="", rng=rng) != first


def test_beginnings_of_prompts_are_equal_as_far_as_the_prompts_are():
    block = "x" * CACHE_BLOCK_CHARACTERS
    one, two = prefix_hashes(block + block + "a"), prefix_hashes(block + block + "b")
    assert one[:2] == two[:2] and one[2] != two[2]
    assert prefix_hashes("y" * CACHE_BLOCK_CHARACTERS + block)[1] != one[1], "a block counts only after the same beginning"


def test_the_share_is_of_those_that_play_and_those_that_will():
    views = [view(0, episodes=16), view(1, episodes=15)]
    assert within_share(views, num_awaited=0, num_groups=1, episodes_per_group=8) == views
    # 9 groups for 2 + 2 instances: 2 each, which are 16 episodes.
    assert within_share(views, num_awaited=2, num_groups=9, episodes_per_group=8) == views[1:]


# -- sync policies


@pytest.mark.parametrize(
    ("policy", "instance", "wants"),
    [
        ("eager", view(episodes=9), True),
        ("request_num", view(episodes=3), True),
        ("request_num", view(episodes=4), False),
        # A quarter of its best of 100 tokens/s is 25.
        ("throughput", view(load=InstanceLoad(tokens_per_s=24.9), best_tokens_per_s=100.0), True),
        ("throughput", view(load=InstanceLoad(tokens_per_s=25.0), best_tokens_per_s=100.0), False),
        ("throughput", view(), False),
        ("kv_cache", view(load=InstanceLoad(cache_usage=0.1)), True),
        ("kv_cache", view(load=InstanceLoad(cache_usage=0.11)), False),
        ("kv_cache", view(), False),
        ("starvation", view(), False),
    ],
)
def test_a_sync_policy_looks_at_its_own_figure(policy, instance, wants):
    chosen = SyncConfig(policy=policy, request_num=3, throughput=0.25, kv_cache=0.1)
    assert sync_policies.resolve(policy)(instance, 1, chosen) is wants


def test_the_best_throughput_is_of_this_life_of_the_instance():
    instance = view()
    instance.observe(InstanceLoad(tokens_per_s=100.0))
    instance.observe(InstanceLoad(tokens_per_s=40.0))
    assert instance.best_tokens_per_s == 100.0
    instance.go_down()
    instance.come_up(0)
    assert (instance.best_tokens_per_s, instance.load) == (0.0, None)


# -- filters


def test_rewards_carry_a_signal_if_they_differ():
    assert has_signal([0.0, 1.0, 0.0])
    assert not has_signal([1.0, 1.0]) and not has_signal([1.0]) and not has_signal([])


def test_dynamic_sampling_stops_with_the_histogram_at_its_limit_of_one_step():
    sampling = DynamicSampling(max_filtered=3)
    sampling.leave_out(pass_rate=1.0), sampling.leave_out(pass_rate=0.0)
    assert sampling.num_filtered == 2
    sampling.begin_step()
    sampling.leave_out(pass_rate=1.0), sampling.leave_out(pass_rate=0.0)
    with pytest.raises(TooManyFailuresError, match=r"dropped 3 groups.*max_num_gen_batches.*pass rates: 0: 1, 1: 2"):
        sampling.leave_out(pass_rate=1.0)


def test_the_proactive_filter_names_the_longest_in_flight_so_many_a_step():
    chosen = ProactiveFilterConfig(action="null", time_limit_s=10.0, max_per_step=1)
    proactive, in_flight = ProactiveFilter(chosen), {"a": 0.0, "b": 1.0, "c": 2.0}
    assert proactive.overdue(in_flight, 10.0) == [], "at the limit is within it"
    assert proactive.overdue(in_flight, 50.0) == ["a"]
    assert proactive.overdue(in_flight, 50.0) == []
    proactive.begin_step()
    assert proactive.overdue(in_flight, 50.0) == ["b"], "a was named before"
    proactive.begin_step()
    proactive.forget("a")
    assert proactive.overdue({"b": 1.0, "c": 2.0, "a": 45.0}, 50.0) == ["c"]


def test_a_proactive_filter_that_is_off_names_nobody():
    assert ProactiveFilter(ProactiveFilterConfig()).overdue({"a": 0.0}, 1e9) == []
