"""Settings of asynchronous training that have no effect, or cannot work, with the others: `psrl.sync`, `psrl.routing`, redundancy, ..."""

from __future__ import annotations

from psrl.config.gateway_checks import starts_gateway
from psrl.config.refusals import DEFAULTS, refuse, refuse_dead
from psrl.config.tree import Config

REQUEST_TIMEOUT = "gen_actor_rollout_ref.rollout.request_timeout_s"
SYNC_MARGIN_S = 60
"""Proposed beyond the longest turn, for the weights themselves."""
SYNC_THRESHOLDS = ("request_num", "throughput", "kv_cache")
"""Policies of `psrl.sync.policy` with a setting of their own, which has their name."""


def check_asynchrony(config: Config) -> None:
    """Each setting that differs from its default changes the run, and the data plane holds what the ledger admits.

    Raises:
        ConfigError: The first broken rule.
    """
    for check in (_check_sync, _check_partial_rollout, _check_routing, _check_proactive_filter, _check_redundancy, _check_storage):
        check(config)
    if config.psrl.restarts.max_restarts == 0:
        fix = "set psrl.restarts.max_restarts=3"
        refuse_dead(config, ["psrl.restarts.window_s"], because="psrl.restarts.max_restarts=0", fix=fix)


def _check_sync(config: Config) -> None:
    psrl = config.psrl
    if psrl.staleness == 0:
        because = "psrl.staleness=0: no replica gets work before it has the newest weights"
        refuse_dead(config, ["psrl.sync.policy"], because=because, fix="set psrl.staleness=1 or more")
    for policy in SYNC_THRESHOLDS:
        if psrl.sync.policy != policy:
            because = f"psrl.sync.policy={psrl.sync.policy}"
            refuse_dead(config, [f"psrl.sync.{policy}"], because=because, fix=f"set psrl.sync.policy={policy}")


def _check_partial_rollout(config: Config) -> None:
    psrl = config.psrl
    key = "psrl.partial_rollout.interrupt_as_prompt"
    if not psrl.partial_rollout.enable:
        refuse_dead(config, [key], because="psrl.partial_rollout.enable=false", fix="set psrl.partial_rollout.enable=true")
    if psrl.staleness == 0 and psrl.redundant_groups == 0 and psrl.redundant_episodes == 0:
        because, fix = "psrl.staleness=0: no replica samples while it takes newer weights", "set psrl.staleness=1 or more"
        keys = ["psrl.partial_rollout.enable"] if psrl.routing.migrate else ["psrl.partial_rollout.enable", key]
        refuse_dead(config, keys, because=because, fix=fix)
    turn_s, sync_s = config.gen_actor_rollout_ref.rollout.request_timeout_s, psrl.deadlines.weight_sync_s
    if not psrl.partial_rollout.enable and turn_s >= sync_s:
        rule = (
            f"lets turns end before newer weights are taken: as long as {REQUEST_TIMEOUT}={turn_s:g} allows, "
            f"which psrl.deadlines.weight_sync_s={sync_s:g} cuts off"
        )
        fix = f"set psrl.deadlines.weight_sync_s={turn_s + SYNC_MARGIN_S:g}, or {REQUEST_TIMEOUT} below {sync_s:g}"
        refuse(config, "psrl.partial_rollout.enable", rule, fix)


def _check_routing(config: Config) -> None:
    psrl, num_replicas = config.psrl, config.gen_actor_rollout_ref.rollout.num_replicas
    keys = [key for key in DEFAULTS if key.startswith("psrl.routing.")]
    if num_replicas == 1:
        fix = "set gen_actor_rollout_ref.rollout.num_replicas=2"
        refuse_dead(config, keys, because="there is one replica", fix=fix)
    if starts_gateway(config):
        because = "the run has a gateway, which routes by itself"
        refuse_dead(config, keys, because=because, fix="use loops that need no gateway and set psrl.rollout_gateway.enable=false")
    if not psrl.routing.migrate:
        return
    if not psrl.partial_rollout.interrupt_as_prompt:
        rule = "moves turns with what they have sampled, which needs psrl.partial_rollout.interrupt_as_prompt=true"
        refuse(config, "psrl.routing.migrate", rule, "set psrl.partial_rollout.interrupt_as_prompt=true")
    if psrl.routing.sticky != "group":
        rule = f"moves whole groups, which psrl.routing.sticky={psrl.routing.sticky} tears apart"
        refuse(config, "psrl.routing.migrate", rule, "set psrl.routing.sticky=group")


def _check_proactive_filter(config: Config) -> None:
    psrl = config.psrl
    proactive = psrl.proactive_filter
    if proactive.action == "none":
        keys = ["psrl.proactive_filter.time_limit_s", "psrl.proactive_filter.max_per_step"]
        fix = "set psrl.proactive_filter.action to retry, truncate or null"
        refuse_dead(config, keys, because="psrl.proactive_filter.action=none", fix=fix)
    elif proactive.action == "retry" and psrl.max_reissues == 0:
        rule = "issues a group again, which psrl.max_reissues=0 forbids"
        refuse(config, "psrl.proactive_filter.action", rule, "set psrl.max_reissues=1, or psrl.proactive_filter.action='\"null\"'")


def _check_redundancy(config: Config) -> None:
    psrl, batch = config.psrl, config.data.train_batch_size
    at_most = (psrl.staleness + 1) * (batch + psrl.redundant_groups)
    if psrl.max_groups_in_flight > at_most:
        rule = (
            "is more than is ever admitted, (psrl.staleness + 1) x (data.train_batch_size + psrl.redundant_groups) = "
            f"({psrl.staleness} + 1) x ({batch} + {psrl.redundant_groups}) = {at_most}"
        )
        refuse(config, "psrl.max_groups_in_flight", rule, f"set psrl.max_groups_in_flight={at_most} or less")
    if psrl.max_groups_in_flight == 1:
        because, fix = "psrl.max_groups_in_flight=1: no two groups compete", "set psrl.max_groups_in_flight=2 or more"
        refuse_dead(config, ["psrl.redundant_groups"], because=because, fix=fix)


def _check_storage(config: Config) -> None:
    psrl, batch = config.psrl, config.data.train_batch_size
    groups = (psrl.staleness + 1) * (batch + psrl.redundant_groups)
    rows = groups * (psrl.rollout_n + psrl.redundant_episodes)
    if rows > config.transfer_queue.total_storage_size:
        rule = (
            "holds fewer rows than may wait for their updates: (psrl.staleness + 1) x (data.train_batch_size + psrl.redundant_groups) "
            f"x (psrl.rollout_n + psrl.redundant_episodes) = ({psrl.staleness} + 1) x ({batch} + {psrl.redundant_groups}) "
            f"x ({psrl.rollout_n} + {psrl.redundant_episodes}) = {rows}"
        )
        refuse(config, "transfer_queue.total_storage_size", rule, f"set transfer_queue.total_storage_size={2 * rows}")
