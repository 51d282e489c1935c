"""Which data may train which weights, who plays it and who syncs when: pure, tested by property tests and run by the simulator."""

from psrl.staleness.admission import Admission
from psrl.staleness.buffer import BufferState
from psrl.staleness.coordinator import Coordinator, CoordinatorSettings, Outstanding, Overdue, SyncOrder
from psrl.staleness.filters import DynamicSampling, OverdueAction, ProactiveFilter, has_signal
from psrl.staleness.instances import Instance, InstanceLoad
from psrl.staleness.ledger import Consumed, LedgerSnapshot, StalenessLedger
from psrl.staleness.migration import Move

__all__ = [
    "Admission",
    "BufferState",
    "Consumed",
    "Coordinator",
    "CoordinatorSettings",
    "DynamicSampling",
    "Instance",
    "InstanceLoad",
    "LedgerSnapshot",
    "Move",
    "Outstanding",
    "Overdue",
    "OverdueAction",
    "ProactiveFilter",
    "StalenessLedger",
    "SyncOrder",
    "has_signal",
]
