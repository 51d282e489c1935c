"""Small builders for tests of the coordinator."""

from psrl.config.asynchrony import ProactiveFilterConfig, RoutingConfig, SyncConfig
from psrl.staleness import Coordinator, CoordinatorSettings, Instance, InstanceLoad, StalenessLedger


def coordinator_of(
    *,
    staleness=0,
    groups=1,
    redundant=0,
    instances=1,
    episodes=1,
    max_in_flight=100,
    max_reissues=1,
    sync=None,
    routing=None,
    proactive=None,
    last=None,
) -> Coordinator:
    """At version 0, every instance up and serving it."""
    ledger = StalenessLedger(staleness=staleness, groups_per_buffer=groups, version=0, redundant_groups=redundant, last_version=last)
    chosen = CoordinatorSettings(
        episodes_per_group=episodes,
        max_groups_in_flight=max_in_flight,
        max_reissues=max_reissues,
        sync=sync or SyncConfig(),
        routing=routing or RoutingConfig(),
        proactive_filter=proactive or ProactiveFilterConfig(),
        seed=1,
    )
    coordinator = Coordinator(chosen, ledger, num_instances=instances)
    for index in range(instances):
        coordinator.instance_is_up(index, 0)
    return coordinator


def admit(coordinator: Coordinator, names, *, now_s=0.0) -> list:
    """(V_traj, instances) of each admission, None where there was none."""
    admissions = [coordinator.admit(name, now_s=now_s) for name in names]
    return [None if each is None else (each.version, each.instances) for each in admissions]


def update(coordinator: Coordinator) -> None:
    """Train on the ready buffer and publish."""
    coordinator.consume()
    coordinator.published(coordinator.advance())


def sync(coordinator: Coordinator) -> list:
    """Carry out all orders; (instance, version) of each."""
    orders = coordinator.due_syncs()
    for order in orders:
        coordinator.sync_began(order.instance)
        coordinator.synced(order.instance, order.version)
    return [(order.instance, order.version) for order in orders]


def view(index=0, *, version=0, episodes=0, load: InstanceLoad | None = None, best_tokens_per_s=0.0) -> Instance:
    """An instance that is up."""
    instance = Instance(index=index, version=version, is_up=True, load=load, best_tokens_per_s=best_tokens_per_s)
    instance.num_episodes = episodes
    return instance
