"""A project's own settings of pytest, less the options that say how a run is spread, cut short, repeated, measured or printed.

Tests run as the project says (`pythonpath`, `markers`, `filterwarnings`, `--import-mode`, `-p`, its own options), but in one process,
each once, all of them. The settings are read from the files that pytest would read, as they lie there after the patch was held to
`hygiene`. Pure.
"""

from __future__ import annotations

import base64
import binascii
import configparser
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SECTION_OF = {
    "pytest.toml": ("pytest",),
    ".pytest.toml": ("pytest",),
    "pytest.ini": ("pytest",),
    ".pytest.ini": ("pytest",),
    "pyproject.toml": ("tool", "pytest"),
    "tox.ini": ("pytest",),
    "setup.cfg": ("tool:pytest",),
}
"""Files in the order in which pytest looks for them, and where their settings are."""
ALWAYS_READ = ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini")
"""They end the search although they say nothing."""
READ_SCRIPT = """
printf 'PYTHONPATH %s\\n' "$(printf %s "$PYTHONPATH" | base64 | tr -d '\\n')"
for file in "$@"; do
  if [ -f "$file" ]; then printf '%s %s\\n' "$(printf %s "$file" | base64 | tr -d '\\n')" "$(base64 < "$file" | tr -d '\\n')"; fi
done
"""
"""Prints the search path of the sandbox's Python, then each file that is there: name and content."""
DROPPED_ALONE = frozenset(
    {
        "-x", "--exitfirst", "--sw", "--stepwise", "--sw-skip", "--stepwise-skip", "--sw-reset", "--stepwise-reset", "--lf",
        "--last-failed", "--ff", "--failed-first", "--nf", "--new-first", "--cache-clear", "--co", "--collect-only", "--setup-only",
        "--setup-plan", "--pdb", "--trace", "--forked", "--boxed", "--looponfail", "-f", "--no-cov", "--no-cov-on-fail", "--cov-append",
        "--cov-branch", "--cov-reset", "--testmon", "--json-report", "--instafail", "--self-contained-html", "--random-order",
        "--flake-finder",
    }
)  # fmt: skip
DROPPED_WITH_VALUE = frozenset(
    {
        "-n", "--numprocesses", "--dist", "--tx", "--px", "--rsyncdir", "--max-worker-restart", "--maxprocesses", "--maxschedchunk",
        "--maxfail", "--lfnf", "--last-failed-no-failures", "--cov-report", "--cov-config", "--cov-fail-under", "--cov-context",
        "--cov-precision", "--reruns", "--reruns-delay", "--only-rerun", "--rerun-except", "--timeout", "--timeout-method",
        "--session-timeout", "--rootdir", "--confcutdir", "--basetemp", "--junitxml", "--junit-xml", "--junit-prefix", "--html", "--css",
        "--json-report-file", "--report-log", "--resultlog", "--randomly-seed", "--random-order-bucket", "--random-order-seed", "--count",
        "--repeat-scope", "--assert", "-c", "--config-file", "--durations", "--durations-min", "--splits", "--group",
    }
)  # fmt: skip
DROPPED_WITH_PERHAPS_A_VALUE = frozenset({"--cov"})
DROPPED_PLUGINS = frozenset(
    {
        "xdist", "xdist.plugin", "xdist.looponfail", "pytest_cov", "pytest_cov.plugin", "pytest_forked", "pytest_rerunfailures", "randomly",
        "pytest_randomly", "random_order", "pytest_timeout", "pytest_repeat",
    }
)  # fmt: skip
"""Of `-p`; named or not, what they add to a run is said by the options above."""
WITH_VALUE = "rkmnpWoc"
"""One-letter options of pytest that take a value: what follows them in a group of letters is it."""
FIXED = ("-p", "no:randomly", "-p", "no:random_order")
"""Each run of a patch has one order of tests; pytest takes these also where there are no such plugins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PytestSettings:
    """What the runner is told of the project's settings."""

    options: tuple[str, ...] = ()
    """Put into `PYTEST_ADDOPTS`."""
    pythonpath: tuple[str, ...] = ()
    """The project's own, below the folder of its settings; absolute."""


def files_to_read(workdir: str, targets: Sequence[str]) -> tuple[str, ...]:
    """Where pytest would look for its settings, in its order: from the tests' common folder up to `workdir`; absolute paths."""
    folders = [path.rpartition("/")[0] if path.endswith(".py") else path for path in targets] or [workdir]
    common = folders[0].split("/")
    for folder in folders[1:]:
        parts = folder.split("/")
        while common != parts[: len(common)]:
            common.pop()
    found = []
    while len(common) >= len(workdir.split("/")):
        found += [f"{'/'.join(common)}/{name}" for name in SECTION_OF]
        common.pop()
    return tuple(found)


def read_files(output: bytes) -> tuple[str, dict[str, bytes]]:
    """What READ_SCRIPT printed: (PYTHONPATH, content by path)."""
    python_path, files = "", {}
    for line in output.splitlines():
        name, _, content = line.partition(b" ")
        try:
            text = base64.b64decode(content)
            if name == b"PYTHONPATH":
                python_path = text.decode("utf-8", "replace")
            else:
                files[base64.b64decode(name).decode("utf-8", "replace")] = text
        except binascii.Error:
            continue
    return python_path, files


def settings_of(order: Sequence[str], files: Mapping[str, bytes]) -> PytestSettings:
    """The settings that pytest would find first; none where a file cannot be read: pytest says so itself.

    Args:
        order: `files_to_read`.
        files: Content by path.
    """
    for path in order:
        if path not in files:
            continue
        try:
            found = _section(path.rsplit("/", 1)[-1], files[path].decode("utf-8"))
            if found is None:
                continue
            options = _words(found, "addopts")
            folder = path.rpartition("/")[0]
            pythonpath = tuple(each if each.startswith("/") else f"{folder}/{each}" for each in _words(found, "pythonpath"))
        except (ValueError, configparser.Error, RecursionError):
            return PytestSettings(options=FIXED)
        override = ("-o", f"addopts={shlex.join(kept_options(options))}") if options else ()
        return PytestSettings(options=(*override, *FIXED), pythonpath=pythonpath)
    return PytestSettings(options=FIXED)


def kept_options(options: Sequence[str]) -> list[str]:
    """`addopts` less what spreads, cuts short, repeats, measures or prints a run.

    Example:
        `-n 2 -xq --import-mode=importlib --cov shop -p my.plugin -m "not slow"` ->
        `-q --import-mode=importlib -p my.plugin -m "not slow"`.
    """
    kept: list[str] = []
    left = list(options)
    while left:
        option = left.pop(0)
        name, has_value = option.partition("=")[0], "=" in option
        if name in DROPPED_ALONE:
            continue
        if name in DROPPED_WITH_VALUE:
            left[: 0 if has_value else 1] = []
        elif name in DROPPED_WITH_PERHAPS_A_VALUE:
            left[: 1 if not has_value and left and not left[0].startswith("-") else 0] = []
        elif option == "-p" and left:
            plugin = left.pop(0)
            kept += [] if plugin in DROPPED_PLUGINS else ["-p", plugin]
        elif option.startswith("-p") and option[2:] in DROPPED_PLUGINS:
            continue
        elif option.startswith("-") and not option.startswith("--"):
            letters, last = _kept_letters(option[1:])
            kept += [f"-{letters}"] if letters else []
            if last and left:  # an option that takes a value ends the group
                value = left.pop(0)
                kept += [value] if letters.endswith(last) else []
        else:
            kept.append(option)
            if option in ("--override-ini", "--pythonwarnings", "--import-mode", "--deselect", "--ignore", "--ignore-glob") and left:
                kept.append(left.pop(0))
    return kept


def _kept_letters(letters: str) -> tuple[str, str]:
    """(a group of one-letter options less `x`, `f`, and `n` and `c` with their values; its last letter if that wants a value)."""
    kept = ""
    for position, letter in enumerate(letters):
        if letter in WITH_VALUE:
            last = letter if position == len(letters) - 1 else ""
            return (kept, last) if letter in "nc" else (kept + letters[position:], last)
        kept += "" if letter in "xf" else letter
    return kept, ""


def _section(name: str, text: str) -> dict[str, Any] | None:
    """pytest's settings in a file; None where pytest looks further."""
    if name.endswith(".toml"):
        found: Any = tomllib.loads(text)
        for part in SECTION_OF[name]:
            found = found[part] if isinstance(found, dict) and part in found else None
        if name == "pyproject.toml" and isinstance(found, dict) and "ini_options" in found:
            found = found["ini_options"]
        is_named = isinstance(found, dict) and (name != "pyproject.toml" or bool(found))
        return dict(found) if is_named and found is not None else ({} if name in ALWAYS_READ else None)
    parser = configparser.RawConfigParser(strict=False, inline_comment_prefixes=None, comment_prefixes=("#", ";"))
    parser.read_string(text)
    for section in SECTION_OF[name]:
        if parser.has_section(section):
            return dict(parser.items(section))
    return {} if name in ALWAYS_READ else None


def _words(settings: Mapping[str, Any], name: str) -> list[str]:
    if name not in settings:
        return []
    value = settings[name]
    return [str(each) for each in value] if isinstance(value, list) else shlex.split(str(value), comments=False)
