"""Append-only files of one JSON object per line, which survive a crash in the middle of a line.

The writer is the only owner of its file. Reading uses the standard library's parser: unlike orjson it keeps integers beyond
64 bits and lone surrogates, both of which a policy can write into a tool call.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS | orjson.OPT_APPEND_NEWLINE


class JsonLinesFile:
    """Appends to one file; every line is handed to the operating system before `append` returns."""

    def __init__(self, path: Path) -> None:
        """Make the file or go on with it; half a line that a crash left at its end is removed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _cut_partial_line(path)
        self._file = path.open("ab", buffering=0)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Add one line, or nothing. Values that JSON does not know are written as their text.

        Raises:
            OSError: The disk refused, such as being full; the file is as it was.
        """
        line, size_bytes = memoryview(encode_line(entry)), os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[self._file.write(line) :]  # a disk that fills up takes a part first
        except OSError:
            self._file.truncate(size_bytes)
            raise

    def close(self) -> None:
        """Close the file; may be called twice."""
        self._file.close()


def encode_line(entry: Mapping[str, Any]) -> bytes:
    """One line of JSON with its newline."""
    try:
        return orjson.dumps(entry, default=str, option=_OPTIONS)
    except TypeError:
        # Integers beyond 64 bits and lone surrogates: slower, exact.
        return json.dumps(entry, default=str).encode() + b"\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonLine:
    """One line of a file."""

    number: int
    """From 1."""
    offset: int
    """Where it begins, in bytes: `read_line_at` finds it again."""
    content: dict[str, Any]


def read_json_lines(path: Path, *, size_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """The objects of a file in order; as `read_lines`."""
    return (line.content for line in read_lines(path, size_bytes=size_bytes))


def read_lines(path: Path, *, size_bytes: int | None = None) -> Iterator[JsonLine]:
    """The lines of a file in order; nothing when it does not exist, an unfinished last line is left out.

    `size_bytes` reads what stood there when the file had that size.

    Raises:
        ValueError: A finished line is not JSON; the message names file and line.
    """
    if not path.exists():
        return
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") or (size_bytes is not None and offset + len(line) > size_bytes):
                return
            try:
                content = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path} line {number} is not JSON: {error}") from error
            yield JsonLine(number=number, offset=offset, content=content)
            offset += len(line)


def read_line_at(path: Path, offset: int) -> dict[str, Any]:
    """The object of the line that begins at `offset`.

    Raises:
        ValueError: None begins there any more.
    """
    with path.open("rb") as file:
        file.seek(offset)
        content: dict[str, Any] = json.loads(file.readline())
        return content


def keep_lines(path: Path, is_kept: Callable[[dict[str, Any]], bool]) -> int:
    """Remove the lines that are not kept, and an unfinished last one; how many went. The file changes at once or not at all.

    Nobody may have the file open for writing.
    """
    if not path.exists():
        return 0
    with path.open("rb") as file:
        verdicts = [line.endswith(b"\n") and is_kept(json.loads(line)) for line in file]
    num_removed = verdicts.count(False)
    if num_removed:
        temporary = path.with_suffix(".kept")
        with path.open("rb") as file, temporary.open("wb") as kept:
            kept.writelines(itertools.compress(file, verdicts))
        os.replace(temporary, path)
    return num_removed


def _cut_partial_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, 2)
        keep = end
        while keep > 0:
            start = max(0, keep - 65536)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep != end:
            file.truncate(keep)
