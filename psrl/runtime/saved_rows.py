"""The data plane's rows of arrived groups in a checkpoint: safetensors files of a bounded size.

In a file each column is one flat tensor of its rows behind each other, beside their lengths; the keys stand in the metadata. Rows are
fetched, written, read and put a file at a time, so that a large run neither holds all of them in the driver nor moves them in one call.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from psrl.data_plane import COLUMN_NAMES, DataPlane, KVBatchMeta, TrajectoryRow
from psrl.errors import CheckpointError

TOKENS_PER_FILE = 8_000_000
"""About 200 MB; a file has more only if one row has."""
LENGTHS = "lengths"
KEYS = "keys"
_PATTERN = "rows-*.safetensors"


def save_rows(folder: Path, metas: Sequence[KVBatchMeta], data_plane: DataPlane, *, tokens_per_file: int = TOKENS_PER_FILE) -> None:
    """Write the rows of `metas` as `rows-00000.safetensors`, ...; nothing where there are none.

    Raises:
        DataPlaneError: They are not there.
        OSError, SafetensorError: The disk refused.
    """
    for number, keys in enumerate(_parts(_tags_of(metas), tokens_per_file)):
        rows = data_plane.fetch(keys, COLUMN_NAMES)
        tensors = {name: torch.cat([row[name] for row in rows]).contiguous() for name in COLUMN_NAMES}
        lengths = torch.tensor([len(row[COLUMN_NAMES[0]]) for row in rows], dtype=torch.int64)
        save_file({**tensors, LENGTHS: lengths}, folder / f"rows-{number:05d}.safetensors", metadata={KEYS: json.dumps(keys)})


def read_rows(folder: Path, metas: Sequence[KVBatchMeta]) -> Iterator[list[TrajectoryRow]]:
    """The rows of `metas`, which may be fewer than were saved, file by file.

    Raises:
        CheckpointError: A file cannot be read, or a row or column is in none of them.
    """
    wanted = _tags_of(metas)
    missing = set(wanted)
    for path in sorted(folder.glob(_PATTERN)):
        try:
            with safe_open(path, framework="pt") as file:
                keys = json.loads(file.metadata()[KEYS])
                lengths = file.get_tensor(LENGTHS).tolist()
                columns = {name: file.get_tensor(name).split(lengths) for name in COLUMN_NAMES}
        except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        found = [(index, key) for index, key in enumerate(keys) if key in wanted]
        missing -= {key for _, key in found}
        if found:
            yield [
                TrajectoryRow(key=key, tags=wanted[key], columns={name: columns[name][index].clone() for name in COLUMN_NAMES})
                for index, key in found
            ]
    if missing:
        raise CheckpointError(f"{folder} does not hold {len(missing)} of {len(wanted)} rows, such as {min(missing)}")


def _tags_of(metas: Sequence[KVBatchMeta]) -> dict[str, Any]:
    return {key: tags for meta in metas for key, tags in zip(meta.keys, meta.tags, strict=True)}


def _parts(tags_of: Mapping[str, Any], tokens_per_file: int) -> Iterator[list[str]]:
    part: list[str] = []
    num_tokens = 0
    for key, tags in tags_of.items():
        if part and num_tokens + tags["num_tokens"] > tokens_per_file:
            yield part
            part, num_tokens = [], 0
        part.append(key)
        num_tokens += tags["num_tokens"]
    if part:
        yield part
