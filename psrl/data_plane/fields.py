"""How a row's columns travel in TransferQueue: those that are read together are one field, the bytes of one after the other.

Each field of each row is a message part, an object in the storage and a tensor to make again: six columns cost three times as much as
two fields. A field's columns lie in the order of their widths, the widest first, and it is padded to whole words, so that each column
lies where a number of its kind may lie.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from psrl.data_plane.columns import COLUMNS, Column
from psrl.errors import DataPlaneError

DTYPES = {"int64": torch.int64, "int32": torch.int32, "int8": torch.int8, "float32": torch.float32}
WORD_BYTES = 8
_COLUMN = {column.name: column for column in COLUMNS}


def _width(column: Column) -> int:
    return DTYPES[column.dtype].itemsize


FIELDS: dict[str, tuple[Column, ...]] = {
    field: tuple(sorted((column for column in COLUMNS if column.field == field), key=_width, reverse=True))
    for field in dict.fromkeys(column.field for column in COLUMNS)
}
assert all(sum(map(_width, columns)) >= WORD_BYTES for columns in FIELDS.values()), "the padding must be less than a token's bytes"


def packed(columns: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The fields of a row, bytes [W], from all its columns.

    Example:
        3 tokens, of which a field has 4 + 4 + 1 bytes each: 27 bytes, and 5 of padding.
    """
    fields: dict[str, torch.Tensor] = {}
    for field, members in FIELDS.items():
        for member in members:
            assert columns[member.name].dtype is DTYPES[member.dtype], f"{member.name} is {columns[member.name].dtype}, not {member.dtype}"
        parts = [columns[member.name].view(torch.uint8) for member in members]
        parts.append(torch.zeros(-sum(map(len, parts)) % WORD_BYTES, dtype=torch.uint8))
        fields[field] = torch.cat(parts)
    return fields


def fields_with(names: Iterable[str]) -> list[str]:
    """The fields in which these columns are.

    Raises:
        DataPlaneError: There is no such column.
    """
    absent = [name for name in names if name not in _COLUMN]
    if absent:
        raise DataPlaneError(f"columns {absent} are in no row; columns.py lists what travels")
    return list(dict.fromkeys(_COLUMN[name].field for name in names))


def unpacked(fields: Mapping[str, torch.Tensor], names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The columns `names` of a row, [T] each, from the fields that have them; views of these where they lie on whole words."""
    columns: dict[str, torch.Tensor] = {}
    for name in names:
        members, raw = FIELDS[_COLUMN[name].field], fields[_COLUMN[name].field]
        if raw.storage_offset() % WORD_BYTES:
            raw = raw.clone()
        num_tokens = len(raw) // sum(map(_width, members))
        begin = num_tokens * sum(map(_width, members[: members.index(_COLUMN[name])]))
        columns[name] = raw[begin : begin + num_tokens * _width(_COLUMN[name])].view(DTYPES[_COLUMN[name].dtype])
    return columns
