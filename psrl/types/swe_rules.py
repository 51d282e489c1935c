"""What each field of a `SweProblem` must be, as a table: (whether a value fits, the words for what does)."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Callable, Mapping
from typing import Any

Rule = tuple[Callable[[Any], bool], str]
MOST_SECONDS = 86_400.0
RESERVED = ("/bin", "/boot", "/dev", "/etc", "/opt/psrl", "/proc", "/run", "/sbin", "/sys", "/usr")
"""Folders of the sandbox itself; those that begin with /lib are too."""
IMAGE = re.compile(r"[A-Za-z0-9][\w.-]*(:\d+)?(/[\w.-]+)*(:\w[\w.-]{0,127})?(@sha256:[0-9a-f]{64})?|sha256:[0-9a-f]{64}", re.ASCII)


def is_text(value: Any) -> bool:
    """Text that can be written as UTF-8 and given to a program."""
    return is_content(value) and "\0" not in value


def is_content(value: Any) -> bool:
    """Text that can be written to a file as UTF-8."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def is_name(value: Any) -> bool:
    """Text that is not empty and has one line."""
    return is_text(value) and value.strip() != "" and len(value.splitlines()) == 1


def is_path(value: Any) -> bool:
    """A path below a folder, in its shortest form, outside of any `.git`."""
    if not is_text(value) or value in ("", ".", "..") or value.startswith(("/", "../")) or posixpath.normpath(value) != value:
        return False
    return ".git" not in value.lower().split("/")


def is_workdir(value: Any) -> bool:
    """An absolute folder in its shortest form that is none of the sandbox's own, nor holds one of them."""
    if not is_text(value) or not value.startswith("/") or value == "/" or value.startswith("//") or posixpath.normpath(value) != value:
        return False
    if value.startswith("/lib"):
        return False
    return not any(f"{value}/".startswith(f"{folder}/") or folder.startswith(f"{value}/") for folder in RESERVED)


def are_files(value: Any) -> bool:
    """Contents by path, where no file stands in another one's way."""
    if not isinstance(value, Mapping) or not all(is_path(path) and is_content(content) for path, content in value.items()):
        return False
    parents = {path[:end] for path in value for end, letter in enumerate(path) if letter == "/"}
    return parents.isdisjoint(value)


def is_seconds(value: Any) -> bool:
    """A number of seconds up to a day."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and 0 < value <= MOST_SECONDS


def _all(fits: Callable[[Any], bool], *, at_least: int = 0) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, tuple) and len(value) >= at_least and all(fits(each) for each in value)


TEXT: Rule = (is_text, "text that UTF-8 can hold, without a null byte")
NAME: Rule = (is_name, "a text of one line")
RULES: dict[str, Rule] = {
    "instance_id": NAME,
    "repo": NAME,
    "task_kind": NAME,
    "statement": TEXT,
    "image": (
        lambda value: is_text(value) and IMAGE.fullmatch(value) is not None,
        "the name of an image, such as name:tag@sha256:... with 64 digits",
    ),
    "workdir": (is_workdir, f"an absolute folder in its shortest form, not /, and none of the system's ({', '.join(RESERVED)}, /lib*)"),
    "files": (are_files, "an object of texts, by paths in their shortest form below workdir, none of which is a folder of another"),
    "gold_patch": TEXT,
    "test_paths": (_all(is_path), "a list of paths in their shortest form below workdir"),
    "test_patch": TEXT,
    "hidden_paths": (_all(is_path), "a list of paths in their shortest form below workdir"),
    "fail_to_pass": (_all(is_text, at_least=1), "a list of texts with at least one"),
    "pass_to_pass": (_all(is_text), "a list of texts"),
    "test_command": TEXT,
    "log_parser": NAME,
    "setup_commands": (_all(is_text), "a list of texts"),
    "timeout_s": (is_seconds, f"a number of seconds above 0, at most {MOST_SECONDS:g}"),
    "allow_network": (lambda value: isinstance(value, bool), "true or false"),
}
