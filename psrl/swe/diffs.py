"""Diffs as `git diff` writes them: which files they touch, and the diff that takes them back.

Strict where git is: a hunk holds exactly the lines that its header counts. Text around the sections (mail headers) says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@(.*)", re.DOTALL)
GIT_HEADER = "diff --git "
NULL = "/dev/null"
NO_NEWLINE = "\\"
SWAPPED_WORDS = {
    "old mode ": "new mode ",
    "new mode ": "old mode ",
    "deleted file mode ": "new file mode ",
    "new file mode ": "deleted file mode ",
    "rename from ": "rename to ",
    "rename to ": "rename from ",
}
"""Header lines of a section, and what they are called in the diff back."""
_ESCAPES = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, '"': 34, "\\": 92}
_ESCAPE = re.compile(rb'\\([0-7]{3}|[abtnvfr"\\])')


class DiffError(ValueError):
    """It is no diff, or none that can be taken back; says where."""


@dataclass(kw_only=True)
class Hunk:
    """One run of changed lines."""

    old_range: str
    """As in the header: `start` or `start,count`."""
    new_range: str
    heading: str
    lines: list[str] = field(default_factory=list)
    """With their first character; `\\` lines belong to the one before."""


@dataclass(kw_only=True)
class FileDiff:
    """What a diff does to one file."""

    header: list[str]
    """Lines before the first hunk."""
    old_path: str | None
    """None where the file is made."""
    new_path: str | None
    """None where it is deleted."""
    is_binary: bool = False
    hunks: list[Hunk] = field(default_factory=list)

    @property
    def paths(self) -> tuple[str, ...]:
        """The one path, or both of a rename."""
        return tuple(dict.fromkeys(path for path in (self.old_path, self.new_path) if path is not None))


def parse_diff(text: str) -> list[FileDiff]:
    """The sections of a diff, one per file.

    Raises:
        DiffError: A hunk has too few or too many lines, a section names no file, or there is none.
    """
    lines = text.split("\n")
    files: list[FileDiff] = []
    position = 0
    while position < len(lines):
        if lines[position].startswith(GIT_HEADER) or _is_plain_header(lines, position):
            file, position = _read_file(lines, position)
            files.append(file)
        elif HUNK.match(lines[position]):
            raise DiffError(f"line {position + 1}: a hunk of no file")
        else:
            position += 1
    if not files:
        raise DiffError("it names no file")
    return files


def touched_paths(text: str) -> tuple[str, ...]:
    """Paths that a diff changes, makes, deletes or renames, in its order, without repetition.

    Raises:
        DiffError: See `parse_diff`.
    """
    return tuple(dict.fromkeys(path for file in parse_diff(text) for path in file.paths))


def reversed_diff(text: str) -> str:
    """The diff that takes `text` back, as `git apply -R` would.

    Raises:
        DiffError: It is no diff; or it holds binary data or a copy, which cannot be turned round without the files.
    """
    return "\n".join(line for file in parse_diff(text) for line in _reversed_file(file)) + "\n"


def _is_plain_header(lines: Sequence[str], position: int) -> bool:
    return position + 1 < len(lines) and lines[position].startswith("--- ") and lines[position + 1].startswith("+++ ")


def _read_file(lines: Sequence[str], start: int) -> tuple[FileDiff, int]:
    """(the section that begins at `start`, where the next one may begin)."""
    position = start
    header: list[str] = []
    while position < len(lines) and not HUNK.match(lines[position]):
        if header and (lines[position].startswith(GIT_HEADER) or (_is_plain_header(lines, position) and _names_files(header))):
            break
        header.append(lines[position])
        position += 1
    old_path, new_path = _paths_of(header, start)
    is_binary = any(line.startswith(("GIT binary patch", "Binary files ")) for line in header)
    file = FileDiff(header=_known_lines(header), old_path=old_path, new_path=new_path, is_binary=is_binary)
    while position < len(lines) and (found := HUNK.match(lines[position])):
        hunk, position = _read_hunk(lines, position, found)
        file.hunks.append(hunk)
    return file, position


def _names_files(header: Sequence[str]) -> bool:
    return any(line.startswith("+++ ") for line in header)


def _known_lines(header: Sequence[str]) -> list[str]:
    words = (GIT_HEADER, "index ", "similarity index ", "dissimilarity index ", "copy from ", "copy to ", "--- ", "+++ ", *SWAPPED_WORDS)
    return [line for line in header if line.startswith(words)]


def _read_hunk(lines: Sequence[str], start: int, found: re.Match[str]) -> tuple[Hunk, int]:
    old_start, old_count, new_start, new_count, heading = found.groups()
    num_old, num_new = int(old_count or 1), int(new_count or 1)
    old_range = old_start if old_count is None else f"{old_start},{old_count}"
    new_range = new_start if new_count is None else f"{new_start},{new_count}"
    hunk = Hunk(old_range=old_range, new_range=new_range, heading=heading)
    position = start + 1
    while num_old or num_new:
        if position == len(lines):
            raise DiffError(f"line {start + 1}: the hunk ends too early")
        line = lines[position] or " "
        if position == len(lines) - 1 and not lines[position]:
            raise DiffError(f"line {start + 1}: the hunk ends too early")
        if line[0] not in " -+\\":
            raise DiffError(f"line {position + 1}: no line of a hunk: {line!r:.80}")
        num_old -= line[0] in " -"
        num_new -= line[0] in " +"
        if num_old < 0 or num_new < 0:
            raise DiffError(f"line {position + 1}: the hunk has more lines than its header says")
        hunk.lines.append(line)
        position += 1
    if position < len(lines) and lines[position].startswith(NO_NEWLINE):
        hunk.lines.append(lines[position])
        position += 1
    if position < len(lines) and _goes_on(lines, position):
        raise DiffError(f"line {position + 1}: the hunk has more lines than its header says")
    return hunk, position


def _goes_on(lines: Sequence[str], position: int) -> bool:
    """Whether a line looks like one more of the hunk; `-- ` is the signature of git's mails."""
    line = lines[position]
    return line[:1] in ("+", "-", " ") and line.strip() not in ("", "--") and not _is_plain_header(lines, position)


def _paths_of(header: Sequence[str], start: int) -> tuple[str | None, str | None]:
    """(old, new): of `---` and `+++`, of a rename, or of the first line where nothing but the mode or binary data changed."""
    words = ("--- ", "+++ ", "rename from ", "rename to ")
    named = {word: line.removeprefix(word) for line in header for word in words if line.startswith(word)}
    if "--- " in named and "+++ " in named:
        old, new = _path_of_side(named["--- "], start), _path_of_side(named["+++ "], start)
    elif "rename from " in named and "rename to " in named:
        old, new = _unquoted(named["rename from "]), _unquoted(named["rename to "])
    else:
        old = new = _path_of_git_header(header[0], start)
    if any(line.startswith("new file mode ") for line in header):
        old = None
    if any(line.startswith("deleted file mode ") for line in header):
        new = None
    if old is None and new is None:
        raise DiffError(f"line {start + 1}: the section names no file")
    return old, new


def _path_of_side(text: str, start: int) -> str | None:
    path = _unquoted(text if text.startswith('"') else text.split("\t")[0].rstrip("\r"))
    if path == NULL:
        return None
    if path[:2] not in ("a/", "b/") or len(path) == 2:
        raise DiffError(f"line {start + 1}: paths begin with a/ and b/, this is {path!r:.80}")
    return path[2:]


def _path_of_git_header(line: str, start: int) -> str:
    """Both sides are equal here: `a/PATH b/PATH`, quoted or not."""
    rest = line.removeprefix(GIT_HEADER)
    half = (len(rest) - 1) // 2
    old, new = _unquoted(rest[:half]), _unquoted(rest[half + 1 :])
    if old[:2] != "a/" or new[:2] != "b/" or old[2:] != new[2:] or len(old) == 2:
        raise DiffError(f"line {start + 1}: the section names no file: {line!r:.80}")
    return old[2:]


def _unquoted(text: str) -> str:
    """git quotes paths with unusual characters as C does: `"a/\\303\\244"`."""
    if not (len(text) > 1 and text.startswith('"') and text.endswith('"')):
        return text

    def byte_of(found: re.Match[bytes]) -> bytes:
        code = found[1].decode()
        return bytes([_ESCAPES[code]]) if code in _ESCAPES else bytes([int(code, 8) % 256])

    return _ESCAPE.sub(byte_of, text[1:-1].encode("utf-8", "surrogateescape")).decode("utf-8", "replace")


def _reversed_file(file: FileDiff) -> Iterator[str]:
    if file.is_binary or any(line.startswith("copy ") for line in file.header):
        raise DiffError(f"{file.paths[0]}: binary data and copies cannot be taken back from the diff alone")
    modes = [line for line in file.header if line.startswith(("old mode ", "new mode "))]
    sides = {line[:4]: line[4:] for line in file.header if line.startswith(("--- ", "+++ "))}
    renames = [line for line in file.header if line.startswith("rename ")]
    for line in file.header:
        if line.startswith(GIT_HEADER):
            yield _reversed_git_header(line, renames)
        elif line in modes or line in renames:
            pair = modes if line in modes else renames
            other = pair[1 - pair.index(line)]
            yield next(swapped + other.removeprefix(word) for word, swapped in SWAPPED_WORDS.items() if other.startswith(word))
        elif line.startswith(("new file mode ", "deleted file mode ")):
            yield next(swapped + line.removeprefix(word) for word, swapped in SWAPPED_WORDS.items() if line.startswith(word))
        elif line.startswith("index "):
            yield re.sub(r"^index ([0-9a-f]+)\.\.([0-9a-f]+)", r"index \2..\1", line)
        elif line.startswith("--- "):
            yield "--- " + _other_side(sides["+++ "], "a")
        elif line.startswith("+++ "):
            yield "+++ " + _other_side(sides["--- "], "b")
        else:
            yield line
    for hunk in file.hunks:
        yield f"@@ -{hunk.new_range} +{hunk.old_range} @@{hunk.heading}"
        yield from _reversed_lines(hunk.lines)


def _reversed_git_header(line: str, renames: Sequence[str]) -> str:
    if not renames:
        return line
    # The two paths differ; both are named again below, which is what `git apply` reads.
    old, new = (rename.split(" ", 2)[2] for rename in renames)
    return f"{GIT_HEADER}{_prefixed(new, 'a')} {_prefixed(old, 'b')}"


def _prefixed(path: str, side: str) -> str:
    return f'"{side}/{path[1:]}' if path.startswith('"') else f"{side}/{path}"


def _other_side(text: str, side: str) -> str:
    if text.split("\t")[0].strip() == NULL:
        return text
    return f'"{side}{text[2:]}' if text.startswith('"') else f"{side}{text[1:]}"


def _reversed_lines(lines: Sequence[str]) -> Iterator[str]:
    """Signs exchanged; within a run of changes what is taken out still comes first."""
    taken: list[str] = []
    put: list[str] = []
    last = taken
    for line in lines:
        if line[0] == NO_NEWLINE and (taken or put):
            last.append(line)
        elif line[0] == "-":
            put.append("+" + line[1:])
            last = put
        elif line[0] == "+":
            taken.append("-" + line[1:])
            last = taken
        else:
            yield from taken
            yield from put
            taken, put = [], []
            last = taken
            yield line
    yield from taken
    yield from put
