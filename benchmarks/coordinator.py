"""What deciding costs: calls a second to the coordinator of asynchronous training, in the mix of a run, with nothing around it.

    python benchmarks/coordinator.py

The aim is that the simulator, which makes every decision of a run, and a driver with dozens of instances never wait for it: 100,000
calls a second with 64 instances.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from psrl.config.asynchrony import RoutingConfig, SyncConfig
from psrl.config.psrl_section import PsrlConfig
from psrl.staleness import Coordinator, CoordinatorSettings, StalenessLedger

PROMPT = "You are a careful assistant who thinks before every answer. " * 6
ARRIVALS_PER_ROUND = 8
"""Groups that arrive between two looks at what can be admitted."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row."""

    instances: int
    groups: int
    staleness: int
    redundant: int
    sync: str
    routing: str
    steps: int


SETTINGS = (
    Setting(instances=64, groups=512, staleness=2, redundant=0, sync="eager", routing="request_num_balance", steps=20),
    Setting(instances=64, groups=512, staleness=2, redundant=64, sync="request_num", routing="request_num_balance", steps=20),
    Setting(instances=64, groups=512, staleness=8, redundant=64, sync="starvation", routing="cache_aware", steps=10),
    Setting(instances=2, groups=8, staleness=1, redundant=2, sync="eager", routing="round_robin", steps=800),
)


def calls_per_s(setting: Setting) -> float:
    """Of CPU time. Groups arrive in random order; whatever can be admitted and synced is, at once."""
    psrl = PsrlConfig(sync=SyncConfig(policy=setting.sync), routing=RoutingConfig(policy=setting.routing))
    ledger = StalenessLedger(staleness=setting.staleness, groups_per_buffer=setting.groups, version=0, redundant_groups=setting.redundant)
    coordinator = Coordinator(CoordinatorSettings.of(psrl, max_groups_in_flight=10**6, seed=1), ledger, num_instances=setting.instances)
    for index in range(setting.instances):
        coordinator.instance_is_up(index, 0)
    rng, in_flight, num_new, num_calls = random.Random(1), [], 0, 0
    began = time.process_time()
    while ledger.version < setting.steps:
        orders = coordinator.due_syncs()
        for order in orders:
            coordinator.sync_began(order.instance)
            coordinator.synced(order.instance, order.version)
        while coordinator.admit(f"g{num_new}", now_s=0.0, prompt=f"{PROMPT}{num_new}") is not None:
            in_flight.append(f"g{num_new}")
            num_new += 1
            num_calls += 1
        for _ in range(min(ARRIVALS_PER_ROUND, len(in_flight))):
            pick = rng.randrange(len(in_flight))
            in_flight[pick], in_flight[-1] = in_flight[-1], in_flight[pick]
            coordinator.arrive(in_flight.pop())
            num_calls += 1
        num_calls += 2 + 2 * len(orders)
        if ledger.is_ready():
            expired = set(coordinator.consume().expired)
            in_flight = [group for group in in_flight if group not in expired]
            coordinator.published(coordinator.advance())
            num_calls += 3
    return num_calls / (time.process_time() - began)


def main() -> None:
    """Print the table."""
    table = Table(box=SIMPLE_HEAD)
    for column in ("instances", "groups", "eta", "spare", "sync", "routing", "calls/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for setting in SETTINGS:
        shown = [
            setting.instances,
            setting.groups,
            setting.staleness,
            setting.redundant,
            setting.sync,
            setting.routing.removeprefix("request_num_"),
        ]
        table.add_row(*(str(value) for value in shown), f"{max(calls_per_s(setting) for _ in range(3)):,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
