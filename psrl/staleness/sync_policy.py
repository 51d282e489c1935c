"""When an instance takes newer weights, as long as it could be given work without them.

A policy is asked about an instance that is up and behind. It can only make an instance sync earlier: one for which the ledger has
no slot any more, or that has just come up, is synced whatever the policy says (`coordinator.py`), so no policy can stop the run.
"""

from __future__ import annotations

from collections.abc import Callable

from psrl.config.asynchrony import SyncConfig
from psrl.registry import Registry
from psrl.staleness.instances import Instance
from psrl.types import PolicyVersion

SyncPolicy = Callable[[Instance, PolicyVersion, SyncConfig], bool]
sync_policies = Registry[SyncPolicy]("sync policy", key="psrl.sync.policy")


@sync_policies.register("eager")
def eager(view: Instance, latest: PolicyVersion, settings: SyncConfig) -> bool:
    """As soon as there are newer weights."""
    return True


@sync_policies.register("request_num")
def request_num(view: Instance, latest: PolicyVersion, settings: SyncConfig) -> bool:
    """When few of its episodes are in flight, so that little is interrupted."""
    return view.num_episodes <= settings.request_num


@sync_policies.register("throughput")
def throughput(view: Instance, latest: PolicyVersion, settings: SyncConfig) -> bool:
    """When it samples slowly, measured by its own best: the long tail of its work is left."""
    return view.load is not None and view.load.tokens_per_s < settings.throughput * view.best_tokens_per_s


@sync_policies.register("kv_cache")
def kv_cache(view: Instance, latest: PolicyVersion, settings: SyncConfig) -> bool:
    """When little of its cache is in use, which a sync makes it compute again."""
    return view.load is not None and view.load.cache_usage <= settings.kv_cache


@sync_policies.register("starvation")
def starvation(view: Instance, latest: PolicyVersion, settings: SyncConfig) -> bool:
    """Only when it would get no work otherwise, which the coordinator sees by itself."""
    return False
