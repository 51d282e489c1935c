"""Sent beside the runner's child: what tests, hooks and files were when they were first seen, and whether they still are.

Standard library alone, Python 3.8 or newer.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import os
import re
import sys
import types
from collections.abc import Callable
from typing import Any

MAX_DIGESTED_BYTES = 64 * 2**20
DECIDING_HOOKS = (
    "pytest_runtest_protocol", "pytest_runtest_setup", "pytest_runtest_call", "pytest_runtest_teardown", "pytest_runtest_makereport",
    "pytest_runtest_logstart", "pytest_runtest_logreport", "pytest_pyfunc_call", "pytest_collection", "pytest_collection_modifyitems",
    "pytest_collection_finish", "pytest_collectstart", "pytest_make_collect_report", "pytest_itemcollected", "pytest_pycollect_makeitem",
    "pytest_pycollect_makemodule", "pytest_runtestloop", "pytest_fixture_setup", "pytest_fixture_post_finalizer",
    "pytest_assertrepr_compare", "pytest_sessionfinish",
)  # fmt: skip
ASSERTING = (
    "copy",
    "datetime",
    "decimal",
    "difflib",
    "doctest",
    "fractions",
    "math",
    "numbers",
    "operator",
    "re",
    "statistics",
    "unittest",
)
"""Modules of Python that tests judge by."""
JUDGING = ("assert", "fail", "run", "debug", "subTest", "skipTest", "_baseAssert", "_getAssert", "_callTest", "_formatMessage")
"""How names of unittest's TestCase begin that a test class does not get while tests run."""
CONSTANTS = (int, float, complex, str, bytes, tuple, frozenset)
GLOBAL_LINE = re.compile(rb"^\s*global\s+(.+)$", re.MULTILINE)
OPEN, BLAKE2B, IS_FILE, COMPILE, PARSE = open, hashlib.blake2b, os.path.isfile, compile, ast.parse


def digests_of(targets: list[str], workdir: str) -> dict[str, bytes]:
    """What lies in the tests' files and folders now, data included, by path; not more than MAX_DIGESTED_BYTES.

    Of tests at the project's root only their own files: what else lies there is no data of theirs.
    """
    paths = [path for path in targets if IS_FILE(path)]
    folders = {path if os.path.isdir(path) else os.path.dirname(path) for path in targets}
    for folder in folders - {workdir.rstrip("/")}:
        for where, names_of_folders, names in os.walk(folder):
            names_of_folders[:] = [name for name in names_of_folders if name not in (".git", "__pycache__", ".pytest_cache")]
            paths += [os.path.join(where, name) for name in names]
    found: dict[str, bytes] = {}
    left = MAX_DIGESTED_BYTES
    for path in dict.fromkeys(paths):
        left -= os.path.getsize(path) if IS_FILE(path) else 0
        if left > 0 or path in targets:
            found[path] = digest_of(path)
    return found


def digest_of(path: str) -> bytes:
    """Of a file's content; empty where it is gone, or is none."""
    try:
        with OPEN(path, "rb") as file:
            return BLAKE2B(file.read()).digest() if IS_FILE(path) else b""
    except OSError:
        return b""


class Files:
    """What is written in files, to compare functions with."""

    def __init__(self, rewrite: Any, is_old: Callable[[str], bool], added: dict[str, Any]) -> None:
        """`rewrite` is pytest's module that rewrites asserts."""
        self._rewritten = getattr(rewrite, "_rewrite_test", None)
        self._path = importlib.import_module("pathlib").Path
        self._is_old, self._added = is_old, added
        self._codes: dict[str, set[Any]] = {}

    def codes_in(self, path: str, config: Any) -> set[Any]:
        """Every code object of a file's source, as Python and as pytest compile it."""
        if path not in self._codes:
            with OPEN(path, "rb") as file:
                found = [COMPILE(file.read(), path, "exec", dont_inherit=True)]
            if self._rewritten is not None:
                found.append(self._rewritten(self._path(path), config)[1])
            codes: set[Any] = set()
            while found:
                code = found.pop()
                codes.add(code)
                found += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
            self._codes[path] = codes
        return self._codes[path]

    def is_foreign(self, code: Any, config: Any) -> bool:
        """Whether it is of the patch, made while the tests run, or not what the file says that it names."""
        path = code.co_filename
        if path.startswith("<frozen"):
            return False
        if path in self._added or not path.startswith("/") or not self._is_old(path):
            return True
        try:
            return code not in self.codes_in(path, config)
        except (OSError, SyntaxError, ValueError):
            return True


class Hooks:
    """pytest's hooks that decide an outcome, and who may stand in them."""

    def __init__(self, files: Files) -> None:
        """`files` knows what functions say."""
        self._files = files
        self._manager: Any = None
        self._callers: dict[str, Any] = {}
        self._inner: Any = None
        self._known: dict[int, tuple[Any, Any]] = {}

    def remember(self, manager: Any, own: list[Any]) -> None:
        """Called for each plugin that is registered; the first time counts: pytest's own plugins are there and nothing else."""
        if self._manager is not None:
            return
        self._manager, self._inner = manager, vars(manager).get("_inner_hookexec")
        self._callers = {name: getattr(manager.hook, name) for name in DECIDING_HOOKS if hasattr(manager.hook, name)}
        functions = [implementation.function for caller in self._callers.values() for implementation in caller.get_hookimpls()]
        self._known = {id(function): (function, getattr(function, "__code__", None)) for function in (*functions, *own)}

    def fault(self, config: Any, relay: Any) -> str | None:
        """What is wrong with them; `relay` is what an item calls them through."""
        manager = self._manager
        if config.pluginmanager is not manager or vars(manager).get("_inner_hookexec") is not self._inner:
            return "the way in which hooks are called was replaced"
        for name, caller in self._callers.items():
            current: Any = getattr(manager.hook, name, None)
            if current is not caller:
                return f"the hook {name} was replaced"
            of_item = vars(relay)[name] if relay is not None and name in vars(relay) else caller
            if type(of_item) not in (type(caller), *type(caller).__subclasses__()):
                return f"the hook {name} was replaced"
            implementations = [*caller.get_hookimpls(), *([] if of_item is caller else of_item.get_hookimpls())]
            for implementation in implementations:
                fault = self._fault_of(implementation.function, config)
                if fault:
                    return f"{fault} has the hook {name}"
        return None

    def _fault_of(self, function: Any, config: Any) -> str | None:
        plain = function.__func__ if type(function) is types.MethodType else function
        code = plain.__code__ if type(plain) is types.FunctionType else None
        known = self._known.get(id(function)) or self._known.get(id(plain))
        if known is not None and known[0] in (function, plain):
            return None if known[1] is code else f"code other than its own in {code!r:.60}"
        if code is None:
            return None if type(plain) in (type(len), type(str.join)) else f"{type(plain).__name__!r}"
        if self._files.is_foreign(code, config):
            return f"{code.co_filename} of the patch"
        self._known[id(plain)] = (plain, code)
        return None


class TestModules:
    """What the tests' own modules and classes hold, as it was when they were collected."""

    def __init__(self, paths: set[str]) -> None:
        """The loaded modules that lie at `paths`."""
        self._seen: list[tuple[Any, ...]] = []
        self._classes: list[tuple[type, frozenset[str]]] = []
        for where, module in list(sys.modules.items()):
            path = getattr(module, "__file__", None)
            if type(module) is types.ModuleType and isinstance(path, str) and path in paths:
                with OPEN(path, "rb") as file:
                    source = file.read()
                rebound = {name.strip().decode("utf-8", "replace") for found in GLOBAL_LINE.findall(source) for name in found.split(b",")}
                self._remember(where, vars(module), rebound)
                self._check_imports(where, vars(module), source)

    def _check_imports(self, where: str, space: dict[str, Any], source: bytes) -> None:
        """What `import pytest` and the like bind at the top of a file must be that."""
        for node in PARSE(source).body:
            for alias in node.names if isinstance(node, ast.Import) else ():
                name = alias.asname or alias.name.split(".")[0]
                module = sys.modules.get(alias.name if alias.asname else name)
                if alias.name.split(".")[0] in ("pytest", *ASSERTING) and name in space and module is not None:
                    self._seen.append((where, space, name, module, None))

    def _remember(self, where: str, space: dict[str, Any], rebound: set[str]) -> None:
        for name, value in list(space.items()):
            kind = type(value)
            if name in rebound or name[:2] == "__":
                continue
            if kind is types.FunctionType:
                self._seen.append((where, space, name, value, value.__code__))
            elif kind in (types.ModuleType, *CONSTANTS):
                self._seen.append((where, space, name, value, None))
            elif isinstance(value, type):
                self._seen.append((where, space, name, value, None))
                if value.__module__ == where:
                    own: Any = vars(value)
                    self._classes.append((value, frozenset(own)))
                    functions = [(key, each) for key, each in own.items() if type(each) is types.FunctionType]
                    self._seen += [(f"{where}.{name}", own, key, each, each.__code__) for key, each in functions]

    def changed(self) -> str | None:
        """The first thing that is not what it was."""
        for where, space, name, value, code in self._seen:
            if space.get(name) is not value:
                return f"{where}.{name} was replaced"
            if code is not None and value.__code__ is not code:
                return f"the code of {where}.{name} was replaced"
        for kind, names in self._classes:
            for name in vars(kind).keys() - names:
                if name.startswith(JUDGING):
                    return f"{kind.__name__} got {name} while tests ran"
        return None


class Collected:
    """A test, as it was collected."""

    def __init__(self, item: Any) -> None:
        """Remember what is run, and on what."""
        self.item, self.name, self.kind = item, item.nodeid, type(item)
        self.function = getattr(item, "function", None)
        self.code = getattr(self.function, "__code__", None)
        self.defaults = getattr(self.function, "__defaults__", None)
        self.params = dict(getattr(getattr(item, "callspec", None), "params", None) or {})
        self.own = frozenset(vars(item))

    def is_changed(self) -> bool:
        """Whether it is another test now."""
        item, function = self.item, self.function
        params = getattr(getattr(item, "callspec", None), "params", None) or {}
        return (
            type(item) is not self.kind
            or item.nodeid != self.name
            or getattr(item, "function", None) is not function
            or getattr(function, "__code__", None) is not self.code
            or getattr(function, "__defaults__", None) is not self.defaults
            or any(params.get(name, self) is not value for name, value in self.params.items())
            or any(name in ("runtest", "ihook", "setup", "teardown") for name in vars(item).keys() - self.own)
        )
