"""A data plane inside one process: for training on stored trajectories and for tests of what stands on the contract."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from psrl.data_plane.contract import KVBatchMeta, Partition, TrajectoryRow
from psrl.errors import DataPlaneError
from psrl.telemetry.flow import Flow


class MemoryDataPlane:
    """`DataPlane` in a dictionary."""

    def __init__(self) -> None:
        self.flow = Flow()
        self._rows: dict[Partition, dict[str, TrajectoryRow]] = {partition: {} for partition in Partition}

    def put(self, rows: Sequence[TrajectoryRow], partition: Partition = Partition.TRAIN) -> KVBatchMeta:
        """Store rows."""
        for row in rows:
            self._rows[partition][row.key] = row
        return meta_of(rows, partition)

    def fetch(self, keys: Sequence[str], columns: Sequence[str], partition: Partition = Partition.TRAIN) -> list[dict[str, torch.Tensor]]:
        """Columns of the rows, in the order of `keys`."""
        missing = [key for key in keys if key not in self._rows[partition]]
        if missing:
            raise DataPlaneError(f"partition {partition} does not hold {missing[:5]} ({len(missing)} of {len(keys)} keys)")
        rows = [self._rows[partition][key] for key in keys]
        absent = [column for column in columns if any(column not in row.columns for row in rows)]
        if absent:
            raise DataPlaneError(f"columns {absent} are in no row; columns.py lists what travels")
        return [{column: row.columns[column] for column in columns} for row in rows]

    def keys(self, partition: Partition = Partition.TRAIN) -> list[str]:
        """Every key."""
        return list(self._rows[partition])

    def clear(self, keys: Sequence[str], partition: Partition = Partition.TRAIN) -> None:
        """Forget rows."""
        for key in keys:
            self._rows[partition].pop(key, None)


def meta_of(rows: Sequence[TrajectoryRow], partition: Partition) -> KVBatchMeta:
    """Keys and tags of rows, without their tensors."""
    return KVBatchMeta(keys=[row.key for row in rows], tags=[dict(row.tags) for row in rows], partition_id=partition.value)
