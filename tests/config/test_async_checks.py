"""Settings of asynchronous training: what has no effect or cannot work is refused before anything starts."""

import pytest
from config_files import write_recipe

from psrl.config.load import load_config
from psrl.config.ranges import CHOICES
from psrl.errors import ConfigError
from psrl.staleness.filters import OverdueAction
from psrl.staleness.routing import routers
from psrl.staleness.sync_policy import sync_policies

TWO = "gen_actor_rollout_ref.rollout.num_replicas=2"
STALE = "psrl.staleness=1"
MIGRATE = "psrl.routing.migrate=true"
AS_PROMPT = "psrl.partial_rollout.interrupt_as_prompt=true"
GATEWAY = "psrl.rollout_gateway.enable=true"
TURN_S = "gen_actor_rollout_ref.rollout.request_timeout_s"

# (overrides, key of the error, words of rule and fix)
WRONG = [
    (["psrl.sync.policy=starvation"], "psrl.sync.policy", "psrl.staleness=0"),
    ([STALE, "psrl.sync.request_num=2"], "psrl.sync.request_num", "set psrl.sync.policy=request_num"),
    ([STALE, "psrl.sync.throughput=0.9"], "psrl.sync.throughput", "while psrl.sync.policy=eager"),
    ([STALE, "psrl.sync.policy=request_num", "psrl.sync.kv_cache=0.9"], "psrl.sync.kv_cache", "set psrl.sync.policy=kv_cache"),
    ([STALE, "psrl.partial_rollout.enable=false", AS_PROMPT], AS_PROMPT.split("=")[0], "set psrl.partial_rollout.enable=true"),
    (["psrl.partial_rollout.enable=false"], "psrl.partial_rollout.enable", "set psrl.staleness=1"),
    ([AS_PROMPT], AS_PROMPT.split("=")[0], "set psrl.staleness=1"),
    ([STALE, "psrl.partial_rollout.enable=false", f"{TURN_S}=180"], "psrl.partial_rollout.enable", "set psrl.deadlines.weight_sync_s=240"),
    ([STALE, "psrl.partial_rollout.enable=false", "psrl.deadlines.weight_sync_s=30"], "psrl.partial_rollout.enable", f"{TURN_S} below 30"),
    ([STALE, "psrl.sync.policy=throughput", "psrl.sync.throughput=0"], "psrl.sync.throughput", "above 0"),
    (["psrl.routing.policy=random"], "psrl.routing.policy", "num_replicas=2"),
    (["psrl.routing.sticky=trajectory"], "psrl.routing.sticky", "one replica"),
    ([MIGRATE, AS_PROMPT], "psrl.routing.migrate", "one replica"),
    ([TWO, GATEWAY, "psrl.routing.policy=random"], "psrl.routing.policy", "psrl.rollout_gateway.enable=false"),
    ([TWO, MIGRATE], "psrl.routing.migrate", "set psrl.partial_rollout.interrupt_as_prompt=true"),
    ([TWO, MIGRATE, AS_PROMPT, "psrl.routing.sticky=trajectory"], "psrl.routing.migrate", "set psrl.routing.sticky=group"),
    (["psrl.proactive_filter.time_limit_s=9"], "psrl.proactive_filter.time_limit_s", "retry, truncate or null"),
    (["psrl.proactive_filter.max_per_step=9"], "psrl.proactive_filter.max_per_step", "retry, truncate or null"),
    (["psrl.proactive_filter.action=null"], "psrl.proactive_filter.action", """psrl.proactive_filter.action='"null"'"""),
    (["psrl.proactive_filter.action=retry", "psrl.max_reissues=0"], "psrl.proactive_filter.action", "set psrl.max_reissues=1"),
    # (1 + 1) x (16 + 2) = 36 groups at most.
    ([STALE, "psrl.redundant_groups=2", "psrl.max_groups_in_flight=37"], "psrl.max_groups_in_flight", "max_groups_in_flight=36"),
    (["psrl.redundant_groups=2", "psrl.max_groups_in_flight=1"], "psrl.redundant_groups", "max_groups_in_flight=2"),
    # (2 + 1) x (16 + 4) x (8 + 2) = 600 rows.
    (["psrl.staleness=2", "psrl.redundant_groups=4", "psrl.redundant_episodes=2", "transfer_queue.total_storage_size=599"],
     "transfer_queue.total_storage_size", "total_storage_size=1200"),
    (["psrl.restarts.max_restarts=0", "psrl.restarts.window_s=9"], "psrl.restarts.window_s", "psrl.restarts.max_restarts=3"),
]  # fmt: skip

RIGHT = [
    ["psrl.staleness=2", "psrl.redundant_groups=4", "psrl.redundant_episodes=2", "transfer_queue.total_storage_size=600"],
    ["psrl.proactive_filter.action='null'"],
    [STALE, "psrl.sync.policy=throughput", "psrl.sync.throughput=0.9", "psrl.partial_rollout.enable=false"],
    [STALE, "psrl.partial_rollout.enable=false", f"{TURN_S}=600", "psrl.deadlines.weight_sync_s=601"],
    [STALE, f"{TURN_S}=600"],
    [TWO, MIGRATE, AS_PROMPT, "psrl.routing.policy=cache_aware"],
    ["psrl.redundant_episodes=1", AS_PROMPT],
    ["psrl.redundant_groups=2", "psrl.max_groups_in_flight=18", "psrl.max_reissues=0"],
    ["psrl.proactive_filter.action=retry", "psrl.proactive_filter.time_limit_s=9", "psrl.proactive_filter.max_per_step=3"],
]


@pytest.mark.parametrize(("overrides", "key", "words"), WRONG, ids=[" ".join(row[0]) for row in WRONG])
def test_what_has_no_effect_or_cannot_work_is_refused(tmp_path, overrides, key, words):
    with pytest.raises(ConfigError) as caught:
        load_config(str(write_recipe(tmp_path)), overrides)
    assert caught.value.key == key
    assert words in str(caught.value)


@pytest.mark.parametrize("overrides", RIGHT, ids=" ".join)
def test_what_has_an_effect_is_accepted(tmp_path, overrides):
    load_config(str(write_recipe(tmp_path)), overrides)


def test_the_choices_are_what_is_registered():
    assert tuple(sorted(CHOICES["psrl.sync.policy"])) == sync_policies.names
    assert tuple(sorted(CHOICES["psrl.routing.policy"])) == routers.names
    assert set(CHOICES["psrl.proactive_filter.action"]) == {"none", *OverdueAction}
