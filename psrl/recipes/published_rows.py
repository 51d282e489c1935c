"""Where published rows are read from: a file, a folder of files, or a data set of the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from psrl.datasets.rows import read_raw_rows
from psrl.errors import ConfigError

ENDINGS = (".parquet", ".jsonl", ".json")


def rows_of_source(source: Path, *, split: str | None) -> Iterator[tuple[str, int, Any]]:
    """(file, row, the row or the error that reading it raised) of a file, or of every file of a folder in the order of their names.

    Args:
        source: `.parquet`, `.jsonl`, `.json` (a list, or one row a line), or a folder that holds such files.
        split: Of a folder: only files with this in their name.

    Raises:
        ConfigError: There is no such file.
    """
    for path in _files_of(source, split):
        rows = _json_list(path) if path.suffix == ".json" else None
        for row, raw in enumerate(rows if rows is not None else read_raw_rows(str(path), key="--source")):
            yield path.name, row, raw


def rows_of_hub(name: str, *, split: str, subset: str | None = None) -> Iterator[tuple[str, int, Any]]:
    """The rows of a data set of the hub, through the `datasets` library; `subset` of those that have several.

    Raises:
        ConfigError: The library is not installed, or the data set cannot be had.
    """
    try:
        import datasets
    except ImportError as error:
        fix = "pip install datasets, or download the rows and give --source FOLDER"
        raise ConfigError(key="--hub", value=name, rule="needs the library datasets, which is not installed", fix=fix) from error
    try:
        rows = datasets.load_dataset(name, subset, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        rule = f"{name} (split {split}) cannot be had: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.200}"
        fix = "see that this machine reaches the hub and that name and split are right, or give --source FOLDER with a copy"
        raise ConfigError(key="--hub", value=name, rule=rule, fix=fix) from error
    for row, raw in enumerate(rows):
        yield name, row, dict(raw)


def _files_of(source: Path, split: str | None) -> list[Path]:
    if source.is_file():
        if source.suffix not in ENDINGS:
            raise ConfigError(key="--source", value=str(source), rule=f"has the ending {source.suffix!r}", fix=f"give {', '.join(ENDINGS)}")
        return [source]
    found = sorted(path for path in source.rglob("*") if path.suffix in ENDINGS and path.is_file())
    chosen = [path for path in found if split is None or split in path.name]
    if not chosen:
        names = ", ".join(path.name for path in found[:10]) or "none"
        rule = f"holds no file of rows{'' if split is None else f' with {split!r} in its name'} (found: {names})"
        raise ConfigError(key="--source", value=str(source), rule=rule, fix=f"put files with the ending {', '.join(ENDINGS)} there")
    return chosen


def _json_list(path: Path) -> list[Any] | None:
    """The rows of a file that is one JSON list; None where it has one row a line."""
    with path.open("rb") as file:
        if file.read(4096).lstrip()[:1] != b"[":
            return None
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        rule = f"cannot be read as JSON ({error})"
        raise ConfigError(key="--source", value=str(path), rule=rule, fix="make the file again") from error
    assert isinstance(rows, list), path
    return rows
