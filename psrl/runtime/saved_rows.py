"""The data plane's rows of arrived groups in a checkpoint: one safetensors file.

Each column is one flat tensor of all rows behind each other, beside their lengths; the keys stand in the file's metadata. Ragged
rows of five columns thus cost six tensors, however many there are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from psrl.data_plane import COLUMN_NAMES, DataPlane, KVBatchMeta, TrajectoryRow
from psrl.errors import CheckpointError

LENGTHS = "lengths"
KEYS = "keys"


def save_rows(path: Path, metas: Sequence[KVBatchMeta], data_plane: DataPlane) -> None:
    """Write the rows of `metas`; nothing is written where there are none.

    Raises:
        DataPlaneError: They are not there.
        OSError, SafetensorError: The disk refused.
    """
    keys = [key for meta in metas for key in meta.keys]
    if not keys:
        return
    rows = data_plane.fetch(keys, COLUMN_NAMES)
    tensors = {name: torch.cat([row[name] for row in rows]).contiguous() for name in COLUMN_NAMES}
    lengths = torch.tensor([len(row[COLUMN_NAMES[0]]) for row in rows], dtype=torch.int64)
    save_file({**tensors, LENGTHS: lengths}, path, metadata={KEYS: json.dumps(keys)})


def read_rows(path: Path, metas: Sequence[KVBatchMeta]) -> list[TrajectoryRow]:
    """The rows of `metas`, which may be fewer than the file has.

    Raises:
        CheckpointError: The file cannot be read, or a row or column is not in it.
    """
    wanted = {key: tags for meta in metas for key, tags in zip(meta.keys, meta.tags, strict=True)}
    if not wanted:
        return []
    try:
        with safe_open(path, framework="pt") as file:
            keys = json.loads(file.metadata()[KEYS])
            lengths = file.get_tensor(LENGTHS).tolist()
            columns = {name: file.get_tensor(name).split(lengths) for name in COLUMN_NAMES}
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
    index_of = {key: index for index, key in enumerate(keys)}
    missing = sorted(wanted.keys() - index_of.keys())
    if missing:
        raise CheckpointError(f"{path} does not hold {len(missing)} of {len(wanted)} rows, such as {missing[0]}")
    return [
        TrajectoryRow(key=key, tags=tags, columns={name: columns[name][index_of[key]].clone() for name in COLUMN_NAMES})
        for key, tags in wanted.items()
    ]
