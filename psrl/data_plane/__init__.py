"""Sample data between processes: TransferQueue, keyed by trajectory uid, described by `columns.py`."""

from psrl.data_plane.columns import COLUMN_NAMES, COLUMNS, TrajectoryTags
from psrl.data_plane.contract import PARTITION, DataPlane, KVBatchMeta, TrajectoryRow, oldest_version_of, rows_of
from psrl.data_plane.memory import MemoryDataPlane

__all__ = [
    "COLUMNS",
    "COLUMN_NAMES",
    "PARTITION",
    "DataPlane",
    "KVBatchMeta",
    "MemoryDataPlane",
    "TrajectoryRow",
    "TrajectoryTags",
    "oldest_version_of",
    "rows_of",
]
