"""The runner's child: a program sent into a sandbox that runs pytest on the project and reports each test over a signed pipe.

It shares its process with the code under test, so nothing here is out of that code's reach in principle. What it does about that:
everything that tells an outcome is bound before the project's first line runs, compared afterwards, and cross-checked by tests whose
end is known; and an audit hook, which nothing can take away, raises the alarm where lines that the patch brought reach for it. An
alarm is one byte that cannot be taken back. Standard library and pytest alone.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import os
import sys
import types
from collections.abc import Callable, Generator, Iterator
from typing import Any

MAX_MESSAGE = 400
MAX_DIGESTED_BYTES = 64 * 2**20
CHECK_EVERY_TEST_UP_TO = 300
"""Tests; beyond that the machinery is compared at each new file only."""
WATCHED = (
    "_pytest.runner", "_pytest.reports", "_pytest.python", "_pytest.main", "_pytest.nodes", "_pytest.skipping", "_pytest.outcomes",
    "_pytest.unittest", "_pytest.fixtures", "_pytest.raises", "_pytest.python_api", "_pytest._code.code", "_pytest.config", "_pytest.stash",
    "_pytest.assertion", "_pytest.assertion.rewrite", "_pytest.assertion.util", "pluggy", "pluggy._hooks", "pluggy._callers",
    "pluggy._manager", "pluggy._result", "unittest.case", "unittest.suite", "unittest.result",
)  # fmt: skip
"""Modules whose functions and classes decide or carry an outcome."""
ALARMS = frozenset(
    {
        "gc.get_objects", "gc.get_referrers", "gc.get_referents", "sys._getframe", "sys._current_frames", "sys._current_exceptions",
        "sys.settrace", "sys.setprofile", "sys.addaudithook", "sys._getframemodulename", "sys.monitoring.register_callback",
    }
)  # fmt: skip
ATTRIBUTE_ALARMS = frozenset({"tb_frame", "gi_frame", "cr_frame", "ag_frame", "__code__", "gi_code"})
DECIDING_HOOKS = (
    "pytest_runtest_protocol", "pytest_runtest_setup", "pytest_runtest_call", "pytest_runtest_teardown", "pytest_runtest_makereport",
    "pytest_pyfunc_call", "pytest_collection_modifyitems", "pytest_pycollect_makeitem", "pytest_pycollect_makemodule", "pytest_runtestloop",
    "pytest_fixture_setup",
)  # fmt: skip
STANDARD_NAMES = frozenset(getattr(sys, "stdlib_module_names", sys.builtin_module_names)) | {"pytest", "_pytest", "pluggy", "iniconfig"}
NUM_BEFORE, NUM_BETWEEN = 3, 3
Speak = Callable[..., None]


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


def alarm_of(fd: int) -> Callable[[str], None]:
    """A cry that cannot be taken back: it needs no signature, since it can only harm who raises it."""
    write = os.write
    cried: list[str] = []

    def alarm(why: str) -> None:
        if len(cried) < 10:
            cried.append(why)
            write(fd, b"!" + why.encode("utf-8", "replace").replace(b"\n", b" ")[:300] + b"\n")

    return alarm


def gives_away(code: types.CodeType) -> bool:
    """Whether a function of the standard library hands what it reaches for to its caller."""
    file = code.co_filename
    return file.endswith(("/inspect.py", "/ctypes/__init__.py")) or (
        file.endswith("/traceback.py") and code.co_name in ("walk_stack", "walk_tb")
    )


def watch_audit(added: dict[str, list[list[int]]], alarm: Callable[[str], None]) -> None:
    """Have the interpreter tell of each reach for frames, the collector and memory that a line of the patch makes."""
    get_frame = sys._getframe
    busy: list[bool] = []
    runs_of = {path: tuple((first, last) for first, last in runs) for path, runs in added.items()}

    def is_of_patch(frame: Any) -> bool:
        while frame is not None and gives_away(frame.f_code):
            frame = frame.f_back
        while frame is not None and not frame.f_code.co_filename.startswith(("/", "<frozen")):
            frame = frame.f_back  # made by exec: whoever ran it
        runs = runs_of.get(frame.f_code.co_filename) if frame is not None else None
        return runs is not None and any(first <= (frame.f_lineno or 0) <= last for first, last in runs)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ALARMS:
            pass
        elif event in ("object.__getattr__", "object.__setattr__"):
            if arguments[1] not in ATTRIBUTE_ALARMS or (event == "object.__getattr__" and arguments[1] == "__code__"):
                return
        elif event == "open":
            if not (isinstance(arguments[0], str) and arguments[0].startswith("/proc/") and arguments[0].endswith(("/mem", "/environ"))):
                return
        elif not event.startswith("ctypes."):
            return
        if busy:
            return
        busy.append(True)
        try:
            if is_of_patch(get_frame(1)):
                alarm(f"a line of the patch reached for {event} {arguments[1:2]!r:.60}")
        finally:
            busy.clear()

    if runs_of:
        sys.addaudithook(hook)


class Machinery:
    """What tells outcomes, as it was before the project's first line ran."""

    def __init__(self) -> None:
        """Import and remember it."""
        self._seen: list[tuple[str, dict[str, Any], str, Any, Any]] = []
        for name in WATCHED:
            try:
                module = importlib.import_module(name)
            except ImportError:  # another version of pytest
                continue
            self._remember(name, vars(module))
        for name, value in vars(builtins).items():
            self._seen.append(("builtins", vars(builtins), name, value, None))
        for module, name in ((os, "_exit"), (os, "write"), (sys, "exit"), (importlib, "import_module")):
            self._seen.append((module.__name__, vars(module), name, getattr(module, name), None))

    def _remember(self, where: str, space: dict[str, Any]) -> None:
        for name, value in list(space.items()):
            if isinstance(value, types.FunctionType):
                self._seen.append((where, space, name, value, value.__code__))
            elif isinstance(value, type) and value.__module__ == where:
                self._seen.append((where, space, name, value, None))
                for attribute, member in vars(value).items():
                    function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
                    code = function.__code__ if isinstance(function, types.FunctionType) else None
                    if code is not None or isinstance(member, property):
                        self._seen.append((f"{where}.{name}", vars(value), attribute, member, code))  # type: ignore[arg-type]

    def _is_of_pytest(self, value: Any) -> bool:
        """What pytest replaces itself, again in each session: tests of plugins run sessions inside this one."""
        code = getattr(value, "__code__", None)
        return type(value) is types.FunctionType and code is not None and code.co_filename.endswith("/_pytest/legacypath.py")

    def changed(self, *, is_inside_test: bool = False) -> str | None:
        """The first thing that is not what it was. Fixtures may patch Python's builtins for their test, but not pytest."""
        function_type, missing = types.FunctionType, object()
        for where, space, name, value, code in self._seen:
            if is_inside_test and where in ("builtins", "os", "sys", "importlib"):
                continue
            now = space.get(name, missing)
            if now is not value and name != "_" and not self._is_of_pytest(now):
                return f"{where}.{name} was replaced"
            if code is not None and now is value:
                function = value if type(value) is function_type else value.__func__
                if function.__code__ is not code:
                    return f"the code of {where}.{name} was replaced"
        return None


def message_of(report: Any) -> str:
    """What a failed report says, in one line."""
    crash = getattr(getattr(report, "longrepr", None), "reprcrash", None)
    text = crash.message if crash is not None else str(getattr(report, "longrepr", "") or "")
    return " ".join(text.split())[:MAX_MESSAGE]


def digests_of(targets: list[str]) -> dict[str, bytes]:
    """What lies in the tests' files and folders now, data included, by path; not more than MAX_DIGESTED_BYTES."""
    paths = [path for path in targets if os.path.isfile(path)]
    for folder in {path if os.path.isdir(path) else os.path.dirname(path) for path in targets}:
        for where, _, names in os.walk(folder):
            paths += [os.path.join(where, name) for name in names if where in targets or not where.endswith("__pycache__")]
    found: dict[str, bytes] = {}
    left = MAX_DIGESTED_BYTES
    for path in dict.fromkeys(paths):
        left -= os.path.getsize(path) if os.path.isfile(path) else 0
        if left > 0 or path in targets:
            found[path] = digest_of(path)
    return found


def digest_of(path: str) -> bytes:
    """Of a file's content; empty where it is gone, or is none."""
    try:
        with open(path, "rb") as file:
            return hashlib.blake2b(file.read()).digest() if os.path.isfile(path) else b""
    except OSError:
        return b""


class Reporter:
    """pytest's plugin: runs each test, says how it ended, and compares the machinery."""

    def __init__(self, order: dict[str, Any], speak: Speak, alarm: Callable[[str], None], machinery: Machinery) -> None:
        """Bind what is needed, before the project's first line."""
        runner, python = importlib.import_module("_pytest.runner"), importlib.import_module("_pytest.python")
        rewrite = importlib.import_module("_pytest.assertion.rewrite")
        self._speak, self._alarm, self._machinery = speak, alarm, machinery
        self._run, self._module, self._function = runner.runtestprotocol, python.Module, python.Function
        self._rewritten = getattr(rewrite, "_rewrite_test", None)
        self._canaries, self._canary_source = order["canaries"], order["canary_source"]
        self._added = order["added"]
        self._made = frozenset(order["made"])
        self._digests = digests_of(order["targets"])
        self._functions: dict[int, tuple[Any, Any]] = {}
        self._ends: dict[str, bool] = {}
        self._num_run, self._num_items, self._last_file = 0, 0, ""

    # ------------------------------------------------------------ collection

    def pytest_collectreport(self, report: Any) -> None:
        """A file or folder that cannot be imported."""
        if report.failed:
            self._speak("broken", report.nodeid, message_of(report))

    def pytest_collection_finish(self, session: Any) -> None:
        """Look at what was collected, and put tests with a known end between them."""
        self._compare(session.config)
        self._compare_files()
        known: dict[str, Any] = {}
        for item in session.items:
            path = str(getattr(item, "fspath", ""))
            if path in self._digests and path.endswith(".py") and path not in known:
                known[path] = self._codes_in(path, session.config)
            function = getattr(item, "function", None)
            code = getattr(function, "__code__", None)
            if code is not None and (self._is_brought(code) or (code.co_filename == path and known.get(path) and code not in known[path])):
                self._alarm(f"{item.nodeid} is not what its file says")
            self._functions[id(item)] = (function, code)
        if session.items:
            self._insert_canaries(session)
        self._num_items = len(session.items)

    def _is_brought(self, code: types.CodeType) -> bool:
        """Whether a function is defined by lines of the patch."""
        runs = self._added.get(code.co_filename, ())
        return any(first <= code.co_firstlineno <= last for first, last in runs)

    def _compare_files(self) -> None:
        for path, digest in self._digests.items():
            if digest_of(path) != digest:
                self._alarm(f"{path} was rewritten while the tests ran")

    def _codes_in(self, path: str, config: Any) -> set:  # type: ignore[type-arg]
        with open(path, "rb") as file:
            source = file.read()
        found = [compile(source, path, "exec", dont_inherit=True)]
        if self._rewritten is not None:
            pathlib = importlib.import_module("pathlib")
            found.append(self._rewritten(pathlib.Path(path), config)[1])
        codes = set()
        while found:
            code = found.pop()
            codes.add(code)
            found += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        return codes

    def _insert_canaries(self, session: Any) -> None:
        neighbour = session.items[0].getparent(self._module)
        folder = os.path.dirname(str(session.items[0].fspath))
        token = self._canaries["token"]
        path = os.path.join(folder, f"test_{token}.py")
        with open(path, "w", encoding="utf-8") as file:
            file.write(self._canary_source)
        try:
            parent = neighbour.parent if neighbour is not None else session
            file_argument = {"path": importlib.import_module("pathlib").Path(path)} if hasattr(parent, "path") else {}
            module = self._module.from_parent(parent, **(file_argument or {"fspath": session.items[0].fspath.dirpath(f"test_{token}.py")}))
            items = [self._canary(module, kind) for kind in self._canaries if kind != "token"]
        finally:
            os.unlink(path)
        for item in items:
            self._functions[id(item)] = (item.function, getattr(item.function, "__code__", None))
        middle = len(session.items) // 2
        while 0 < middle < len(session.items) and session.items[middle].fspath == session.items[middle - 1].fspath:
            middle += 1
        before, between, after = items[:NUM_BEFORE], items[NUM_BEFORE : NUM_BEFORE + NUM_BETWEEN], items[NUM_BEFORE + NUM_BETWEEN :]
        session.items[:] = [*before, *session.items[:middle], *between, *session.items[middle:], *after]

    def _canary(self, module: Any, kind: str) -> Any:
        name = self._canaries[kind]
        if kind != "unittest":
            return self._function.from_parent(module, name=name)
        case_class = importlib.import_module("_pytest.unittest").UnitTestCase
        case = case_class.from_parent(module, name=f"T{self._canaries['token']}", obj=getattr(module.obj, f"T{self._canaries['token']}"))
        return next(item for item in case.collect() if item.name == name)

    # ------------------------------------------------------------ one test

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool:
        """Run it as pytest does, and report it once."""
        self._ends.clear()
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = self._run(item, nextitem=nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        self._num_run += 1
        if self._num_items <= CHECK_EVERY_TEST_UP_TO or str(item.fspath) != self._last_file:
            self._compare(item.config)
        self._last_file = str(item.fspath)
        phases, message = ["-", "-", "-"], ""
        for report in reports:
            letter = {"passed": "p", "failed": "f", "skipped": "s"}.get(report.outcome, "?")
            if letter == "p" and not self._ends.get(report.when, False):
                self._alarm(f"{item.nodeid} is said to have passed, and did not")
            if hasattr(report, "wasxfail"):
                letter = {"p": "X", "s": "x"}.get(letter, letter)
            phases[("setup", "call", "teardown").index(report.when)] = letter
            message = message or (message_of(report) if letter == "f" else "")
        self._speak("case", item.nodeid, "".join(phases), message)
        return True

    def pytest_runtest_setup(self, item: Any) -> Iterator[None]:
        """Whether it returned, seen from outside of every other hook."""
        outcome: Any = yield
        self._ends["setup"] = outcome.excinfo is None

    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        """See `pytest_runtest_setup`; the test must still be the one that was collected."""
        function, code = self._functions.get(id(item), (None, None))
        if getattr(item, "function", None) is not function or getattr(function, "__code__", None) is not code or "runtest" in vars(item):
            self._alarm(f"{item.nodeid} was replaced before it ran")
        if self._num_items <= CHECK_EVERY_TEST_UP_TO:
            self._compare(item.config, is_inside_test=True)
        outcome: Any = yield
        self._ends["call"] = outcome.excinfo is None

    def pytest_runtest_teardown(self, item: Any) -> Iterator[None]:
        """See `pytest_runtest_setup`."""
        outcome: Any = yield
        self._ends["teardown"] = outcome.excinfo is None

    # ------------------------------------------------------------ the machinery

    def _compare(self, config: Any, *, is_inside_test: bool = False) -> None:
        changed = self._machinery.changed(is_inside_test=is_inside_test)
        if changed:
            self._alarm(changed)
        hooks = config.pluginmanager.hook
        for name in DECIDING_HOOKS:
            for implementation in getattr(hooks, name).get_hookimpls():
                code = getattr(implementation.function, "__code__", None)
                if code is not None and (code.co_filename in self._added or not code.co_filename.startswith(("/", "<psrl>", "<frozen"))):
                    self._alarm(f"{code.co_filename} of the patch has the hook {name}")
        for name in STANDARD_NAMES & sys.modules.keys():
            if getattr(sys.modules[name], "__file__", None) in self._made:
                self._alarm(f"the patch brought a module named {name}")

    def pytest_sessionfinish(self, session: Any, exitstatus: Any) -> None:
        """The last word."""
        self._compare(session.config)
        self._compare_files()
        self._speak("final", str(int(exitstatus)), str(self._num_items), str(self._num_run))


def main(order: dict[str, Any], install_looks: Callable[[frozenset[str], Callable[[str], None], str], None]) -> None:
    """Run the tests of `order`; `install_looks` is `guest_compare.install`."""
    for name in ("order", "space", "looks"):
        sys.modules["__main__"].__dict__.pop(name, None)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    order["targets"] = [path for path in order["targets"] if os.path.isdir(path) or (os.path.isfile(path) and path.endswith(".py"))]
    fd = order.pop("fd")
    os.set_inheritable(fd, False)
    speech = speaker(fd, bytes.fromhex(order.pop("key")))
    next(speech)
    alarm = alarm_of(fd)
    sys.path[:0] = order["packages"]
    pytest = importlib.import_module("pytest")
    install_looks(frozenset(order["added"]), alarm, os.urandom(12).hex())
    reporter = Reporter(order, lambda *fields: speech.send(fields), alarm, Machinery())
    for name in ("pytest_runtest_setup", "pytest_runtest_call", "pytest_runtest_teardown"):
        pytest.hookimpl(hookwrapper=True, tryfirst=True)(getattr(Reporter, name))
    pytest.hookimpl(tryfirst=True)(Reporter.pytest_runtest_protocol)
    pytest.hookimpl(trylast=True)(Reporter.pytest_collection_finish)
    pytest.hookimpl(trylast=True)(Reporter.pytest_sessionfinish)
    speech.send(("ready",))
    watch_audit(order["added"], alarm)
    sys.argv[:] = ["pytest"]
    sys.path[:0] = [order["workdir"]]
    if not order["targets"]:  # without any, pytest would run whatever it finds
        speech.send(("final", "5", "0", "0"))
        return
    arguments = [*order["targets"], f"--rootdir={order['workdir']}", "-q", "--continue-on-collection-errors", "--maxfail=0"]
    pytest.main(arguments, plugins=[reporter])
