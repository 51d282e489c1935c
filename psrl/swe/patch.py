"""A patch before it is used: what may not be in one, and which lines it brings.

This look decides the cause of a refusal and gives the added lines. What the patch really changed is asked of git after it was
applied (`changes_of`), so that text which git reads otherwise than this parser gains nothing. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from psrl.errors import PsrlError
from psrl.swe.diffs import DiffError, FileDiff, parse_diff
from psrl.swe.verdict import GradeCause

MAX_CHANGED_FILES = 1000
LINK_MODE, SUBMODULE_MODE = "120000", "160000"
_MODE_LINE = re.compile(r"^(?:new file mode|new mode|old mode|deleted file mode|index [0-9a-f]+\.\.[0-9a-f]+) (\d{6})\s*$")
_PATH_LINE = re.compile(r"^(?:---|\+\+\+|rename from|rename to|copy from|copy to) (.*)$")


class PatchRefusedError(PsrlError):
    """The patch is not used, for a cause of its own."""

    def __init__(self, cause: GradeCause, detail: str) -> None:
        super().__init__(detail)
        self.cause = cause
        self.detail = detail


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedPatch:
    """A patch that may be tried."""

    content: bytes
    """As `git apply` reads it: UTF-8, with a final newline."""
    added_lines: dict[str, tuple[tuple[int, int], ...]]
    """By path: first and last number of each run of lines that the patch brings, in the file after it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """What git says of one path after the patch was applied."""

    path: str
    is_new: bool
    mode: str
    """Of the file now; `000000` where it is deleted."""


def check_patch(patch: str, *, max_bytes: int) -> CheckedPatch:
    """The patch, if it may be tried.

    Raises:
        PatchRefusedError: It is empty, too large, no diff, or names what no patch may touch.
    """
    if not patch.strip():
        raise PatchRefusedError(GradeCause.EMPTY_PATCH, "nothing was changed")
    content = encoded(patch)
    if len(content) > max_bytes:
        raise PatchRefusedError(GradeCause.TOO_LARGE, f"the patch has {len(content)} bytes, the limit is {max_bytes}")
    try:
        files = parse_diff(patch)
    except DiffError as error:
        forbidden = _forbidden_in_text(patch)
        if forbidden:
            raise PatchRefusedError(GradeCause.FORBIDDEN_PATH, forbidden) from error
        raise PatchRefusedError(GradeCause.INVALID_PATCH, f"it is no diff: {error}") from error
    if len(files) > MAX_CHANGED_FILES:
        raise PatchRefusedError(GradeCause.TOO_LARGE, f"the patch touches {len(files)} files, the limit is {MAX_CHANGED_FILES}")
    for file in files:
        problem = _problem_of(file)
        if problem:
            raise PatchRefusedError(GradeCause.FORBIDDEN_PATH, problem)
    return CheckedPatch(content=content, added_lines=_added_lines(files))


def encoded(patch: str) -> bytes:
    """UTF-8 with a final newline, which agents' answers often lack.

    Raises:
        PatchRefusedError: It holds what is no text (half of a surrogate pair) or a null byte.
    """
    try:
        content = patch.encode("utf-8")
    except UnicodeEncodeError as error:
        raise PatchRefusedError(GradeCause.INVALID_PATCH, f"it is no UTF-8: {error}") from error
    if b"\0" in content:
        raise PatchRefusedError(GradeCause.INVALID_PATCH, "it holds a null byte; binary files come as `GIT binary patch`")
    return content if content.endswith(b"\n") else content + b"\n"


def changes_of(raw: bytes) -> tuple[Change, ...]:
    """What `git diff --raw -z --no-renames` printed.

    Raises:
        PatchRefusedError: A link or a submodule came or went, a name is no UTF-8, or there are too many.
    """
    fields = raw.split(b"\0")
    changes = []
    for meta, name in zip(fields[0::2], fields[1::2], strict=False):
        _, mode, *_, status = meta.decode("ascii", "replace").split()
        old_mode = meta.decode("ascii", "replace").split()[0].lstrip(":")
        try:
            path = name.decode("utf-8")
        except UnicodeDecodeError as error:
            raise PatchRefusedError(GradeCause.INVALID_PATCH, f"the name {name!r} is no UTF-8") from error
        for special, what in ((LINK_MODE, "symbolic link"), (SUBMODULE_MODE, "submodule")):
            if special in (mode, old_mode):
                raise PatchRefusedError(GradeCause.FORBIDDEN_PATH, f"{path} is a {what}")
        if is_outside(path):
            raise PatchRefusedError(GradeCause.FORBIDDEN_PATH, f"{path} lies outside the project")
        changes.append(Change(path=path, is_new=status == "A", mode=mode))
    if len(changes) > MAX_CHANGED_FILES:
        raise PatchRefusedError(GradeCause.TOO_LARGE, f"the patch changes {len(changes)} files, the limit is {MAX_CHANGED_FILES}")
    return tuple(changes)


def is_outside(path: str) -> bool:
    """Whether a path below the project's folder leaves it, or lies in git's own folder."""
    parts = path.split("/")
    return path.startswith("/") or any(part in ("..", ".", "") or part.lower() in (".git", "git~1") for part in parts)


def _problem_of(file: FileDiff) -> str:
    for path in file.paths:
        if is_outside(path):
            return f"{path} lies outside the project or in .git"
        if any(ord(character) < 32 for character in path):
            return f"the name {path!r} holds control characters"
    for line in file.header:
        found = _MODE_LINE.match(line)
        if found and found[1] in (LINK_MODE, SUBMODULE_MODE):
            return f"{file.paths[0]} is a {'symbolic link' if found[1] == LINK_MODE else 'submodule'}"
    return ""


def _forbidden_in_text(patch: str) -> str:
    """Why lines that the parser could not read would be refused anyway; empty where they would not."""
    for line in patch.split("\n"):
        found = _PATH_LINE.match(line)
        path = found[1].split("\t")[0].strip().strip('"') if found else ""
        path = path[2:] if path[:2] in ("a/", "b/") else path
        if path and path != "/dev/null" and is_outside(path):
            return f"{path} lies outside the project or in .git"
    return ""


def _added_lines(files: list[FileDiff]) -> dict[str, tuple[tuple[int, int], ...]]:
    added: dict[str, tuple[tuple[int, int], ...]] = {}
    for file in files:
        if file.new_path is not None:
            runs = tuple(run for hunk in file.hunks for run in _runs(int(hunk.new_range.split(",")[0]), hunk.lines))
            added[file.new_path] = added.get(file.new_path, ()) + runs
    return added


def _runs(start: int, lines: list[str]) -> Iterator[tuple[int, int]]:
    number, first = start, 0
    for line in lines:
        if line[0] == "+":
            first = first or number
            number += 1
        elif line[0] == " ":
            if first:
                yield first, number - 1
                first = 0
            number += 1
    if first:
        yield first, number - 1
