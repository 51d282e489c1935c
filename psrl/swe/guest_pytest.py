"""The runner's child: a program sent into a sandbox that runs pytest on the project and reports each test over a signed pipe.

It shares its process with the code under test, so nothing here is out of that code's reach in principle. What it does about that:
everything that tells an outcome is remembered before the patch's first line runs, compared afterwards, and cross-checked by tests whose
end is known; pytest holds functions without closures or globals, so that the way to the reporter leads through code objects and frames,
and an audit hook (`guest_watch.py`) cries where lines that the patch brought reach for those. Standard library and pytest alone.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

MAX_MESSAGE = 400
CHECK_EVERY_TEST_UP_TO = 300
"""Tests; beyond that the machinery is compared at each new file only."""
SUFFIXES = (".py", ".txt", ".rst")
"""Of files of tests: Python, and documents with examples."""
NUM_BEFORE, NUM_BETWEEN = 3, 3
Speak = Callable[..., None]


def message_of(report: Any) -> str:
    """What a failed report says, in one line."""
    crash = getattr(getattr(report, "longrepr", None), "reprcrash", None)
    text = crash.message if crash is not None else str(getattr(report, "longrepr", "") or "")
    return " ".join(text.split())[:MAX_MESSAGE]


class Reporter:
    """Runs each test, says how it ended, and compares the machinery. pytest sees none of it but `plugin`."""

    def __init__(self, order: dict[str, Any], speak: Speak, alarm: Callable[[str], None], machinery: Any, watch: Any, state: Any) -> None:
        """Bind what is needed, before the project's first line. `watch` keeps the audit hook; `state` is `guest_state`."""
        runner, self._python = importlib.import_module("_pytest.runner"), importlib.import_module("_pytest.python")
        self._case_class = importlib.import_module("_pytest.unittest").UnitTestCase
        self._speak, self._alarm, self._machinery, self._watch = speak, alarm, machinery, watch
        self._run = runner.runtestprotocol
        self._asserting = state.ASSERTING
        self._canaries, self._canary_source = order["canaries"], order["canary_source"]
        self._added, self._made = order["added"], frozenset(order["made"])
        self._digest_of, self._remember, self._remember_modules = state.digest_of, state.Collected, state.TestModules
        self._digests = state.digests_of(order["targets"], order["workdir"])
        self._files = state.Files(importlib.import_module("_pytest.assertion.rewrite"), watch.is_old, order["added"])
        self._hooks = state.Hooks(self._files)
        self._modules: Any = None
        self._collected: dict[int, Any] = {}
        self._ends: dict[str, bool] = {}
        self._num_run, self._num_items, self._last_file = 0, 0, ""
        self.functions: list[Any] = []
        """What pytest holds of this."""

    # ------------------------------------------------------------ collection

    def plugin_registered(self, manager: Any) -> None:
        """The first plugin is this one's face."""
        self._hooks.remember(manager, self.functions)

    def collectreport(self, report: Any) -> None:
        """A file or folder that cannot be imported."""
        if report.failed:
            self._speak("broken", report.nodeid, message_of(report))

    def collection_finish(self, session: Any) -> None:
        """Look at what was collected, and put tests with a known end between them."""
        self._machinery.first_use()  # where nothing was yet
        plugins = {getattr(plugin, "__file__", None) for plugin in session.config.pluginmanager.get_plugins()}
        self._machinery.forgive(frozenset(path for path in plugins if isinstance(path, str)))
        self._compare(session.config)
        self._compare_files(only_code=False)
        for item in session.items:
            path = str(getattr(item, "fspath", ""))
            code = getattr(getattr(item, "function", None), "__code__", None)
            if code is not None and (self._is_brought(code) or self._is_other(code, path, session.config)):
                self._alarm(f"{item.nodeid} is not what its file says")
        if session.items:
            self._insert_canaries(session)
        self._collected = {id(item): self._remember(item) for item in session.items}
        self._watch.tests.update(id(each.function) for each in self._collected.values())
        self._modules = self._remember_modules({path for path in self._digests if path.endswith(".py")})
        self._num_items = len(session.items)

    def _is_other(self, code: Any, path: str, config: Any) -> bool:
        is_known = path in self._digests and path.endswith(".py") and code.co_filename == path
        return is_known and code not in self._files.codes_in(path, config)

    def _is_brought(self, code: types.CodeType) -> bool:
        """Whether a function is defined by lines of the patch."""
        runs = self._added.get(code.co_filename, ())
        return any(first <= code.co_firstlineno <= last for first, last in runs)

    def _compare_files(self, *, only_code: bool) -> None:
        """Data of tests may be written by tests, once they run."""
        for path, digest in self._digests.items():
            if (path.endswith(".py") or not only_code) and self._digest_of(path) != digest:
                self._alarm(f"{path} was rewritten while the tests ran")

    def _insert_canaries(self, session: Any) -> None:
        neighbour = session.items[0].getparent(self._python.Module)
        folder = os.path.dirname(str(session.items[0].fspath))
        token = self._canaries["token"]
        path = os.path.join(folder, f"test_{token}.py")
        with open(path, "w", encoding="utf-8") as file:
            file.write(self._canary_source)
        try:
            parent = neighbour.parent if neighbour is not None else session
            file_argument = {"path": importlib.import_module("pathlib").Path(path)} if hasattr(parent, "path") else {}
            fallback = {"fspath": session.items[0].fspath.dirpath(f"test_{token}.py")}
            module = self._python.Module.from_parent(parent, **(file_argument or fallback))
            items = [self._canary(module, kind) for kind in self._canaries if kind != "token"]
        finally:
            os.unlink(path)
        middle = len(session.items) // 2
        while 0 < middle < len(session.items) and session.items[middle].fspath == session.items[middle - 1].fspath:
            middle += 1
        before, between, after = items[:NUM_BEFORE], items[NUM_BEFORE : NUM_BEFORE + NUM_BETWEEN], items[NUM_BEFORE + NUM_BETWEEN :]
        session.items[:] = [*before, *session.items[:middle], *between, *session.items[middle:], *after]

    def _canary(self, module: Any, kind: str) -> Any:
        """A test with no fixture but its own: those that the project uses everywhere may need more than it has."""
        name = self._canaries[kind]
        if kind == "unittest":
            case_name = f"T{self._canaries['token']}"
            case = self._case_class.from_parent(module, name=case_name, obj=getattr(module.obj, case_name))
            item = next(item for item in case.collect() if item.name == name)
        else:
            item = self._python.Function.from_parent(module, name=name)
        info = item._fixtureinfo
        names = [name for name in info.names_closure if name in info.argnames]
        definitions = {name: info.name2fixturedefs[name] for name in names if name in info.name2fixturedefs}
        item._fixtureinfo = type(info)(info.argnames, info.argnames, names, definitions)
        item.fixturenames = names
        item._initrequest()
        return item

    # ------------------------------------------------------------ one test

    def protocol(self, item: Any, nextitem: Any) -> bool:
        """Run it as pytest does, and report it once."""
        self._ends.clear()
        collected = self._collected.get(id(item))
        name = collected.name if collected is not None else item.nodeid
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = self._run(item, nextitem=nextitem)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        self._num_run += 1
        if self._num_items <= CHECK_EVERY_TEST_UP_TO or str(item.fspath) != self._last_file:
            self._compare(item.config, item.ihook)
        self._last_file = str(item.fspath)
        phases, message = ["-", "-", "-"], ""
        for report in reports:
            letter = {"passed": "p", "failed": "f", "skipped": "s"}.get(report.outcome, "?")
            if letter == "p" and not self._ends.get(report.when, False):
                self._alarm(f"{name} is said to have passed, and did not")
            if hasattr(report, "wasxfail"):
                letter = {"p": "X", "s": "x"}.get(letter, letter)
            phases[("setup", "call", "teardown").index(report.when)] = letter
            message = message or (message_of(report) if letter == "f" else "")
        self._speak("case", name, "".join(phases), message)
        return True

    def phase(self, when: str, item: Any) -> Iterator[None]:
        """Whether set-up, call or tear-down returned, seen from outside of every other hook; the test must be the one collected."""
        if when == "call":
            collected = self._collected.get(id(item))
            if collected is None or collected.is_changed():
                self._alarm(f"{item.nodeid} was replaced before it ran")
            self._compare_inside(item)
        outcome: Any = yield
        self._ends[when] = outcome.excinfo is None
        if when == "call":
            self._compare_inside(item)

    # ------------------------------------------------------------ the machinery

    def _compare_inside(self, item: Any) -> None:
        if self._num_items <= CHECK_EVERY_TEST_UP_TO:
            self._compare(item.config, item.ihook, is_inside_test=True)

    def _compare(self, config: Any, relay: Any = None, *, is_inside_test: bool = False) -> None:
        changed = self._machinery.changed(is_inside_test=is_inside_test) or self._hooks.fault(config, relay)
        if not changed and not is_inside_test and self._modules is not None:
            changed = self._modules.changed()
        if changed:
            self._alarm(changed)
        for name in self._asserting:
            if getattr(sys.modules.get(name), "__file__", None) in self._made:
                self._alarm(f"the patch brought a module named {name}")

    def sessionfinish(self, session: Any, exitstatus: Any) -> None:
        """The last word."""
        self._compare(session.config)
        self._compare_files(only_code=True)
        self._speak("final", str(int(exitstatus)), str(self._num_items), str(self._num_run))


def _plugin_registered(manager: Any) -> None:
    tell: Any = "psrl:power"
    tell(manager)


def _collectreport(report: Any) -> None:
    tell: Any = "psrl:power"
    tell(report)


def _collection_finish(session: Any) -> None:
    tell: Any = "psrl:power"
    tell(session)


def _runtest_protocol(item: Any, nextitem: Any) -> bool:
    run: Any = "psrl:power"
    return bool(run(item, nextitem))


def _runtest_setup(item: Any) -> Iterator[None]:
    phase: Any = "psrl:power"
    yield from phase("setup", item)


def _runtest_call(item: Any) -> Iterator[None]:
    phase: Any = "psrl:power"
    yield from phase("call", item)


def _runtest_teardown(item: Any) -> Iterator[None]:
    phase: Any = "psrl:power"
    yield from phase("teardown", item)


def _sessionfinish(session: Any, exitstatus: Any) -> None:
    tell: Any = "psrl:power"
    tell(session, exitstatus)


def face_of(reporter: Reporter, hookimpl: Any, sealed: Callable[..., Any]) -> Any:
    """The plugin that pytest gets: functions without a way back to the reporter."""
    face = type("Reporter", (), {})()
    first, last, around = {"tryfirst": True}, {"trylast": True}, {"hookwrapper": True, "tryfirst": True}
    for name, template, power, options in (
        ("plugin_registered", _plugin_registered, reporter.plugin_registered, first),
        ("collectreport", _collectreport, reporter.collectreport, {}),
        ("collection_finish", _collection_finish, reporter.collection_finish, last),
        ("runtest_protocol", _runtest_protocol, reporter.protocol, first),
        ("runtest_setup", _runtest_setup, reporter.phase, around),
        ("runtest_call", _runtest_call, reporter.phase, around),
        ("runtest_teardown", _runtest_teardown, reporter.phase, around),
        ("sessionfinish", _sessionfinish, reporter.sessionfinish, last),
    ):
        function = hookimpl(**options)(sealed(template, power=power))
        reporter.functions.append(function)
        setattr(face, f"pytest_{name}", function)
    return face


def main(order: dict[str, Any], parts: dict[str, Any]) -> None:
    """Run the tests of `order`; `parts` are the programs sent beside this one, by name."""
    for name in ("order", "space", "parts", "name"):
        sys.modules["__main__"].__dict__.pop(name, None)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    order["targets"] = [path for path in order["targets"] if os.path.isdir(path) or (os.path.isfile(path) and path.endswith(SUFFIXES))]
    fd = order.pop("fd")
    os.set_inheritable(fd, False)
    speech = parts["watch"].speaker(fd, bytes.fromhex(order.pop("key")))
    next(speech)
    alarm, sealed = parts["watch"].alarm_of(fd), parts["watch"].sealed
    sys.path[:0] = order["packages"]
    pytest = importlib.import_module("pytest")
    rewrite = importlib.import_module("_pytest.assertion.rewrite")
    vars(rewrite)["PYC_TAIL"] = f"-{os.urandom(6).hex()}.pyc"  # what was rewritten in an earlier run is not what is looked at here
    parts["compare"].install(frozenset(order["added"]), alarm, sealed)
    machinery = parts["watch"].Machinery(order["added"])
    watch = parts["watch"].Watch(order, alarm, machinery.first_use)
    reporter = Reporter(order, lambda *fields: speech.send(fields), alarm, machinery, watch, parts["state"])
    face = face_of(reporter, pytest.hookimpl, sealed)
    speech.send(("ready",))
    watch.install()
    sys.argv[:] = ["pytest"]
    sys.path[:0] = [order["workdir"]]
    if not order["targets"]:  # without any, pytest would run whatever it finds
        speech.send(("final", "5", "0", "0"))
        return
    arguments = [*order["targets"], f"--rootdir={order['workdir']}", "-q", "--continue-on-collection-errors", "--maxfail=0"]
    pytest.main(arguments, plugins=[face])
