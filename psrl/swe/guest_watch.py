"""Sent beside the runner's child: what cries where a patch reaches for the tests' report, and what remembers how the machinery was.

An alarm is one line that cannot be taken back. Audit hooks cannot be taken away. What holds power here is reached only through frames,
code objects, the collector or memory, and each of those has an audit event. Standard library alone, Python 3.8 or newer.
"""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import importlib
import os
import sys
import time
import types
from collections.abc import Callable, Generator
from typing import Any

STARTED_NS = time.time_ns()
STAT, PARSE = os.stat, ast.parse
OWN_NAME = "<psrl>"
WATCHED = (
    "_pytest.runner", "_pytest.reports", "_pytest.python", "_pytest.main", "_pytest.nodes", "_pytest.skipping", "_pytest.outcomes",
    "_pytest.unittest", "_pytest.fixtures", "_pytest.raises", "_pytest.python_api", "_pytest._code.code", "_pytest.config", "_pytest.stash",
    "_pytest.assertion", "_pytest.assertion.rewrite", "_pytest.assertion.util", "_pytest.mark.structures", "_pytest.capture",
    "pluggy", "pluggy._hooks", "pluggy._callers", "pluggy._manager", "pluggy._result", "pluggy._execution", "pluggy.hooks",
    "pluggy.callers", "pluggy.manager", "unittest.case", "unittest.suite", "unittest.result", "unittest.mock", "inspect",
)  # fmt: skip
"""Modules whose functions and classes decide or carry an outcome."""
SET_BY_PYTEST = ("_reprcompare", "_assertion_pass")
WATCHED_WHOLE = ("pytest", "math")
"""Modules of which every name is remembered, whatever it stands for."""
ALARMS = frozenset(
    {
        "gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys._getframe", "sys._current_frames", "sys._current_exceptions",
        "sys.settrace", "sys.setprofile", "sys.addaudithook", "sys._getframemodulename", "sys.monitoring.register_callback",
        "marshal.loads", "code.__new__",
    }
)  # fmt: skip
ATTRIBUTE_ALARMS = frozenset({"tb_frame", "gi_frame", "cr_frame", "ag_frame", "__code__", "gi_code"})
FRAME_PLAIN = ("f_lineno",)
CODE_PLAIN = ("co_name", "co_qualname", "co_filename", "co_firstlineno")
STACK_PLAIN = ("function", "filename", "lineno", "code_context", "index")
Alarm = Callable[[str], None]


def speaker(fd: int, key: bytes) -> Generator[None, tuple[str, ...], None]:
    """Signs and writes what is sent to it, from this process only. The key lives in this suspended frame."""
    write, getpid, blake2b, join = os.write, os.getpid, hashlib.blake2b, b",".join
    pid, number = getpid(), 0
    while True:
        fields = yield
        if getpid() != pid:
            continue  # a fork has its own copy of everything
        body = join([field.encode("utf-8", "replace").hex().encode() for field in fields])
        mac = blake2b(b"%d %s" % (number, body), key=key).hexdigest().encode()
        number += 1
        write(fd, body + b" " + mac + b"\n")


def alarm_of(fd: int) -> Alarm:
    """A cry that cannot be taken back: it needs no signature, since it can only harm who raises it. The parent ends at the first."""
    write = os.write

    def alarm(why: str) -> None:
        write(fd, b"!" + why.encode("utf-8", "replace").replace(b"\n", b" ")[:300] + b"\n")

    return alarm


def sealed(function: Callable[..., Any], **powers: Any) -> Any:
    """The function with `powers` in place of the text constants `psrl:NAME`: no closure, no globals, nothing to be reached or rebound.

    What it can do lies in its code object alone, and reading that has an audit event.
    """
    code = function.__code__
    named = {f"psrl:{name}": power for name, power in powers.items()}
    constants = tuple(named.get(each, each) if isinstance(each, str) else each for each in code.co_consts)
    made = types.FunctionType(code.replace(co_consts=constants), {"__builtins__": builtins}, function.__name__, function.__defaults__)
    made.__qualname__ = function.__name__
    return made


# ------------------------------------------------------------ whose code is it


def is_old(path: str) -> bool:
    """Whether a file lay there, as it is, before the tests began. The time of a file's last change cannot be set."""
    try:
        return STAT(path).st_ctime_ns < STARTED_NS
    except OSError:
        return ".egg/" in path or ".zip/" in path


def gives_away(code: types.CodeType) -> bool:
    """Whether a function of the standard library or of pytest hands what it reaches for to its caller."""
    file, name = code.co_filename, code.co_name
    return (
        file.endswith(("/inspect.py", "/ctypes/__init__.py", "/_pytest/_code/code.py", "/runpy.py", "/pathlib.py", "/codecs.py"))
        or "/pathlib/" in file
        or (file.endswith("/traceback.py") and name in ("walk_stack", "walk_tb"))
        or (file.endswith("/logging/__init__.py") and name in ("currentframe", "<lambda>"))
    )


def plain_lines(source: str) -> dict[int, str]:
    """Lines that ask a frame for a name or a number and keep nothing else of it, by the module they use for that.

    Example:
        `inspect.stack()[1].function`, `sys._getframe(1).f_globals["__name__"]`, `inspect.currentframe().f_lineno`.
    """
    try:
        tree = PARSE(source)
    except (SyntaxError, ValueError):
        return {}
    stores = (ast.Store, ast.Del)
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, stores)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    plain: dict[int, str] = {}
    other: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("_getframe", "currentframe", "stack"):
            call = parents.get(node)
            module = node.value.id if isinstance(node.value, ast.Name) else ""
            lines = range(node.lineno, (getattr(node, "end_lineno", None) or node.lineno) + 1)
            is_plain = module in ("sys", "inspect") and module not in bound and isinstance(call, ast.Call) and call.func is node
            if is_plain and ends_plain(call, parents, is_stack=node.attr == "stack"):
                plain.update(dict.fromkeys(lines, module))
            else:
                other.update(lines)
    return {line: module for line, module in plain.items() if line not in other}


def ends_plain(node: Any, parents: dict[Any, Any], *, is_stack: bool) -> bool:
    """Whether what is made of a frame, or of a stack of them, is text or a number. A trailing `()[1]` is one element."""
    if is_stack:
        node = parents.get(node)
        if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)):
            return False
        last = parents.get(node)
        if isinstance(last, ast.Subscript):
            return isinstance(last.slice, ast.Constant) and last.slice.value in (1, 2, 3, 4, 5)
        return isinstance(last, ast.Attribute) and last.attr in STACK_PLAIN
    while isinstance(parents.get(node), ast.Attribute) and parents[node].attr == "f_back":
        node = parents[node]
    first, second = parents.get(node), parents.get(parents.get(node))
    if not isinstance(first, ast.Attribute):
        return False
    if first.attr == "f_code":
        return isinstance(second, ast.Attribute) and second.attr in CODE_PLAIN
    if first.attr == "f_globals":
        return (
            isinstance(second, ast.Subscript) and isinstance(second.slice, ast.Constant) and second.slice.value in ("__name__", "__file__")
        )
    return first.attr in FRAME_PLAIN


class Watch:
    """The audit hook: the interpreter tells of each reach of the patch for frames, code, the collector, memory and tests."""

    def __init__(self, order: dict[str, Any], alarm: Alarm, first_use: Callable[[], None]) -> None:
        """`first_use` is called once, right before anything of a changed file is read."""
        self._alarm, self._first_use = alarm, first_use
        self._runs = {path: tuple((first, last) for first, last in runs) for path, runs in order["added"].items()}
        self._names = {os.path.basename(path) for path in self._runs}
        self._targets = frozenset(path for path in order["targets"] if path.endswith(".py"))
        self.is_old = functools.lru_cache(maxsize=4096)(is_old)
        self._plain = functools.lru_cache(maxsize=64)(self._plain_lines_of)
        self._library = tuple(os.path.dirname(os.path.abspath(str(module.__file__))) + "/" for module in (os, sys.modules["pytest"]))
        self.tests: set[int] = set()
        """`id`s of functions of tests, whose code is nobody's business."""
        self._is_unused = True

    @staticmethod
    def _plain_lines_of(path: str) -> dict[int, str]:
        try:
            with open(path, encoding="utf-8") as file:
                return plain_lines(file.read())
        except (OSError, ValueError):
            return {}

    def is_of_patch(self, frame: Any, *, is_of_frames: bool = False) -> bool:
        """Whether a line of the patch, or code that came to be while the tests ran, is at work."""
        while frame is not None and gives_away(frame.f_code):
            frame = frame.f_back
        while frame is not None and not frame.f_code.co_filename.startswith(("/", "<frozen", OWN_NAME)):
            frame = frame.f_back  # made by exec: whoever ran it
        if frame is None or not frame.f_code.co_filename.startswith("/"):
            return False
        path = frame.f_code.co_filename
        runs = self._runs.get(path)
        if runs is None:
            return not self.is_old(path)
        line = frame.f_lineno or 0
        if not any(first <= line <= last for first, last in runs):
            return False
        module = self._plain(path).get(line, "") if is_of_frames else ""
        return not (module and any(space.get(module) is sys.modules.get(module) for space in (frame.f_globals, frame.f_locals)))

    def install(self) -> None:
        """From now on, to the process's end."""
        get_frame, busy = sys._getframe, [False]

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            if busy[0]:
                return
            if event == "open" or event == "import":
                name = arguments[0] if event == "open" else arguments[1]
                if not isinstance(name, str):
                    return
                if self._is_unused and name.rpartition("/")[2] in self._names:
                    self._is_unused = False
                    busy[0] = True
                    self._first_use()
                    busy[0] = False
                if event == "import" or not (name in self._targets or (name.startswith("/proc/") and name.endswith(("/mem", "/environ")))):
                    return
            elif event == "object.__getattr__" or event == "object.__setattr__":
                if arguments[1] not in ATTRIBUTE_ALARMS:
                    return
                if event == "object.__getattr__" and arguments[1] == "__code__" and not self._is_private(arguments[0]):
                    return
            elif event == "compile":
                if not (isinstance(arguments[1], str) and (arguments[1] in self._targets or arguments[1].startswith(self._library))):
                    return
            elif event not in ALARMS and not event.startswith("ctypes."):
                return
            busy[0] = True
            try:
                if self.is_of_patch(get_frame(1), is_of_frames=event == "sys._getframe"):
                    self._alarm(f"a line of the patch reached for {event} {arguments[1:2] if arguments[1:2] else arguments[:1]!r:.60}")
            finally:
                busy[0] = False

        if self._runs:
            sys.addaudithook(hook)

    def _is_private(self, function: Any) -> bool:
        space = getattr(function, "__globals__", None)
        return id(function) in self.tests or (type(space) is dict and space.get("__builtins__") is builtins)


# ------------------------------------------------------------ how things were


class Machinery:
    """What tells outcomes, as it was before the patch's first line ran."""

    def __init__(self, added: dict[str, Any]) -> None:
        """Import it. It is remembered at once, and again at `first_use`."""
        self._added = frozenset(added)
        self._modules = {}
        self._is_settled = False
        for name in (*WATCHED, *WATCHED_WHOLE):
            try:
                self._modules[name] = importlib.import_module(name)
            except ImportError:  # another version of pytest
                continue
        self.remember_again()

    def first_use(self) -> None:
        """Nothing of the patch was read until now: what plugins and conftests of the project have changed is theirs to change."""
        if not self._is_settled:
            self._is_settled = True
            self.remember_again()

    def remember_again(self) -> None:
        """As it is now."""
        self._seen: list[tuple[str, dict[str, Any], str, Any, Any]] = []
        for name, module in self._modules.items():
            if name in WATCHED_WHOLE:
                self._seen += [(name, vars(module), key, value, None) for key, value in vars(module).items() if key[:1] != "_"]
            else:
                self.remember(name, vars(module))
        for name, value in vars(builtins).items():
            self._seen.append(("builtins", vars(builtins), name, value, None))
        for module, name in ((os, "_exit"), (os, "write"), (sys, "exit"), (importlib, "import_module")):
            self._seen.append((module.__name__, vars(module), name, getattr(module, name), None))

    def remember(self, where: str, space: dict[str, Any]) -> None:
        """The functions and classes of a module."""
        for name, value in list(space.items()):
            if isinstance(value, types.FunctionType) and name not in SET_BY_PYTEST:
                self._seen.append((where, space, name, value, value.__code__))
            elif isinstance(value, type) and value.__module__ == where:
                self._seen.append((where, space, name, value, None))
                for attribute, member in vars(value).items():
                    function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
                    code = function.__code__ if isinstance(function, types.FunctionType) else None
                    if code is not None or isinstance(member, property):
                        self._seen.append((f"{where}.{name}", vars(value), attribute, member, code))  # type: ignore[arg-type]

    def forgive(self, files: frozenset[str]) -> None:
        """Take as theirs what was replaced by functions of unchanged `files`: conftests, and modules that are plugins."""
        for position, (where, space, name, value, _) in enumerate(self._seen):
            now = space.get(name)
            code = getattr(now, "__code__", None) if type(now) is types.FunctionType else None
            if now is not value and code is not None and code.co_filename in files - self._added and is_old(code.co_filename):
                self._seen[position] = (where, space, name, now, code)

    def changed(self, *, is_inside_test: bool = False) -> str | None:
        """The first thing that is not what it was. Fixtures may patch Python's own for their test, but not pytest."""
        function_type, missing = types.FunctionType, object()
        for where, space, name, value, code in self._seen:
            if is_inside_test and where in ("builtins", "os", "sys", "importlib", "math", "inspect"):
                continue
            now = space.get(name, missing)
            if now is not value and name != "_" and not _is_of_pytest(now):
                return f"{where}.{name} was replaced"
            if code is not None and now is value:
                function = value if type(value) is function_type else value.__func__
                if function.__code__ is not code:
                    return f"the code of {where}.{name} was replaced"
        return None


def _is_of_pytest(value: Any) -> bool:
    """What pytest replaces itself, again in each session: tests of plugins run sessions inside this one."""
    code = getattr(value, "__code__", None)
    return type(value) is types.FunctionType and code is not None and code.co_filename.endswith("/_pytest/legacypath.py")
