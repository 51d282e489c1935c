"""Sample data between processes: TransferQueue, keyed by trajectory uid, described by `columns.py`."""

from psrl.data_plane.columns import COLUMN_NAMES, COLUMNS, TrajectoryTags
from psrl.data_plane.contract import DataPlane, KVBatchMeta, Partition, TrajectoryRow, oldest_version_of, rows_of
from psrl.data_plane.memory import MemoryDataPlane

__all__ = [
    "COLUMNS",
    "COLUMN_NAMES",
    "DataPlane",
    "KVBatchMeta",
    "MemoryDataPlane",
    "Partition",
    "TrajectoryRow",
    "TrajectoryTags",
    "oldest_version_of",
    "rows_of",
]
