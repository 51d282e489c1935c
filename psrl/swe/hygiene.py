"""Which of a patch's files are put back before its tests run: those that say how tests are found, run and told.

Not a list of attacks: a file is put back for what pytest and Python do with its name. An honest patch that touches one loses that
file's change and nothing else. Pure.
"""

from __future__ import annotations

import configparser
import sys
import tomllib
from collections.abc import Iterable, Sequence
from typing import Any

NAMES = frozenset(
    {
        "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "sitecustomize.py", "usercustomize.py",
        ".coveragerc", "pyvenv.cfg", ".gitattributes", ".gitmodules",
    }
)  # fmt: skip
"""Files that configure pytest, Python's start, coverage or git, in any folder."""
SUFFIXES = (".pth", ".egg-link", ".pyc", ".pyo")
"""Hooks of site-packages, and compiled files that Python would take for a source that is not there."""
FOLDERS = ("__pycache__", ".pytest_cache")
FOLDER_SUFFIXES = (".egg-info", ".dist-info")
"""Entry points in them are pytest plugins."""
MIXED_FILES = ("pyproject.toml", "setup.cfg")
"""Hold pytest's settings beside others: put back whole, but only where pytest's settings differ."""
CFG_SECTIONS = ("tool:pytest", "pytest", "coverage:run", "aliases")
RUNNER_MODULES = frozenset({"pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "exceptiongroup", "tomli", "py"})
SHADOWS = RUNNER_MODULES | sys.stdlib_module_names
"""Names that would be imported in place of what runs the tests; which others are installed is asked of the sandbox."""
TEST_FOLDERS = ("test", "tests")
OTHER_TEST_FOLDERS = ("testing",)
"""Of the tests only where no TEST_FOLDERS is above: `numpy/testing/tests` is numpy's own `testing` with tests of it."""


def is_test_path(path: str, test_paths: Iterable[str]) -> bool:
    """Whether a path is one of `test_paths` or lies in one; also where it stands in the way of one, as a file named as its folder."""
    for each in test_paths:
        test_path = each.strip("/")
        if path == test_path or path.startswith(test_path + "/") or test_path.startswith(path + "/"):
            return True
    return False


def is_named_as_test(path: str) -> bool:
    """Whether a file is one of tests by its name, or by that of a folder above it; code with doctests is none.

    Example:
        "shop/test_cart.py", "shop/cart_test.py", "tests/cart.py" are; "shop/cart.py" is not.
    """
    *folders, name = path.split("/")
    is_so_named = name.startswith("test_") or name.endswith(("_test.py", "_tests.py")) or name in ("test.py", "tests.py")
    return name.endswith(".py") and (is_so_named or any(folder.lower() in (*TEST_FOLDERS, *OTHER_TEST_FOLDERS) for folder in folders))


def configures(path: str) -> bool:
    """Whether the file has a name that pytest, Python's start or git looks for."""
    *folders, name = path.split("/")
    return (
        name in NAMES
        or name.endswith(SUFFIXES)
        or any(folder in FOLDERS or folder.endswith(FOLDER_SUFFIXES) for folder in folders)
        or (name.split(".")[0] in ("conftest", "sitecustomize", "usercustomize") and name.endswith((".so", ".pyd")))
    )


def is_mixed(path: str) -> bool:
    """Whether it is one of MIXED_FILES, in any folder."""
    return path.rsplit("/", 1)[-1] in MIXED_FILES


def module_at(path: str, root: str) -> tuple[str, str] | None:
    """(name, entry of `root`) of the module that a file below a folder of Python's search path belongs to; None where it is none.

    Args:
        path: Below the project's folder.
        root: A folder there, empty for the project's own.

    Example:
        ("unittest/case.py", "") -> ("unittest", "unittest"); ("src/json.cpython-311.so", "src") -> ("json", "src/json.cpython-311.so");
        ("README.md", "") -> None.
    """
    prefix = root + "/" if root else ""
    if not path.startswith(prefix):
        return None
    entry = path[len(prefix) :].split("/")[0]
    is_module = path != prefix + entry or entry.endswith((".py", ".so", ".pyd"))
    name = entry.split(".")[0]
    return (name, prefix + entry) if is_module and name.isidentifier() else None


def folders_of_tests(paths: Iterable[str]) -> tuple[str, ...]:
    """The folders of tests that hold `paths`: the topmost one of each path that is named as one. Helpers beside the tests lie there.

    Example:
        "lib/tests/unit/test_a.py" -> "lib/tests"; "shop/test_cart.py" -> none.
    """
    found: dict[str, None] = {}
    for path in paths:
        folders = path.strip("/").split("/")[:-1] if path.endswith(".py") else path.strip("/").split("/")
        for names in (TEST_FOLDERS, OTHER_TEST_FOLDERS):
            position = next((position for position, folder in enumerate(folders) if folder.lower() in names), None)
            if position is not None:
                found["/".join(folders[: position + 1])] = None
                break
    return tuple(found)


def is_same_test_configuration(path: str, before: bytes, after: bytes) -> bool:
    """Whether two versions of a mixed file say the same of pytest; False where the new one cannot be read."""
    read = _toml_part if path.endswith(".toml") else _cfg_part
    try:
        new = read(after)
    except (ValueError, configparser.Error, RecursionError):
        return False
    try:
        return read(before) == new
    except (ValueError, configparser.Error):
        return not new


def _toml_part(content: bytes) -> dict[str, Any]:
    tools = tomllib.loads(content.decode("utf-8")).get("tool", {})
    return {name: tools[name] for name in ("pytest", "coverage") if name in tools} if isinstance(tools, dict) else {"tool": tools}


def _cfg_part(content: bytes) -> dict[str, dict[str, str]]:
    parser = configparser.RawConfigParser(strict=True)
    parser.read_string(content.decode("utf-8"))
    wanted: Sequence[str] = [name for name in parser.sections() if name in CFG_SECTIONS or name.startswith("coverage")]
    return {name: dict(parser.items(name)) for name in wanted}
