"""A data plane inside one process: for training on stored trajectories and for tests of what stands on the contract."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psrl.data_plane.contract import PARTITION, KVBatchMeta, TrajectoryRow
from psrl.errors import DataPlaneError
from psrl.telemetry.flow import Flow


class MemoryDataPlane:
    """`DataPlane` in a dictionary."""

    def __init__(self) -> None:
        self.flow = Flow()
        self._rows: dict[str, TrajectoryRow] = {}

    def put(self, rows: Sequence[TrajectoryRow]) -> KVBatchMeta:
        """Store rows."""
        for row in rows:
            self._rows[row.key] = row
        return meta_of(rows)

    def fetch(self, keys: Sequence[str], columns: Sequence[str]) -> list[dict[str, torch.Tensor]]:
        """Columns of the rows, in the order of `keys`."""
        missing = [key for key in keys if key not in self._rows]
        if missing:
            raise DataPlaneError(f"the data plane does not hold {missing[:5]} ({len(missing)} of {len(keys)} keys)")
        rows = [self._rows[key] for key in keys]
        absent = [column for column in columns if any(column not in row.columns for row in rows)]
        if absent:
            raise DataPlaneError(f"columns {absent} are in no row; columns.py lists what travels")
        return [{column: row.columns[column] for column in columns} for row in rows]

    def keys(self) -> list[str]:
        """Every key."""
        return list(self._rows)

    def clear(self, keys: Sequence[str]) -> None:
        """Forget rows."""
        for key in keys:
            self._rows.pop(key, None)

    def give_up(self) -> None:
        """Nothing waits here."""


def meta_of(rows: Sequence[TrajectoryRow]) -> KVBatchMeta:
    """Keys and tags of rows, without their tensors."""
    return KVBatchMeta(keys=[row.key for row in rows], tags=[dict(row.tags) for row in rows], partition_id=PARTITION)
