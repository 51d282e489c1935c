"""Which data may train which weights: pure integers, tested by property tests."""

from psrl.staleness.ledger import Consumed, StalenessLedger

__all__ = ["Consumed", "StalenessLedger"]
