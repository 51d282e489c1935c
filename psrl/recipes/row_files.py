"""The files that a `psrl prepare` leaves: rows that psrl reads, and `left_out.jsonl` with what became none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from psrl.errors import RowError

LEFT_OUT_FILE = "left_out.jsonl"


def write_rows(parts: Mapping[Path, Iterable[Mapping[str, Any]]]) -> None:
    """JSONL files by path: all of them appear whole, or every one stays as it was."""
    unfinished = {file: file.with_suffix(".unfinished") for file in parts}
    try:
        for file, rows in parts.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            with unfinished[file].open("w", encoding="utf-8") as lines:
                for row in rows:
                    lines.write(json.dumps(row, ensure_ascii=False) + "\n")
        for file, path in unfinished.items():
            path.rename(file)
    finally:
        for path in unfinished.values():
            path.unlink(missing_ok=True)


def write_left_out(folder: Path, left_out: Sequence[RowError]) -> Path:
    """Each with its reason; the file, which is not there where nothing was left out."""
    file = folder / LEFT_OUT_FILE
    file.unlink(missing_ok=True)
    if left_out:
        folder.mkdir(parents=True, exist_ok=True)
        entries = [{"source": error.source, "row": error.row, "reason": error.reason, "detail": error.detail} for error in left_out]
        file.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="ascii")
    return file
