"""`transfer_queue`: the data plane."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class TransferQueueConfig:
    """Sizes of the released TransferQueue."""

    num_data_storage_units: int = 1
    total_storage_size: int = 10000
    """Rows that the storage units hold together."""
