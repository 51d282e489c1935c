"""Patches that mend a project, over many ways to lay one out and to test it; each must be graded as resolved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hostile_patches import by_git
from shop_project import MENDED, diff, edit, problem

from psrl.types import SweProblem

BROKEN = "def double(x):\n    return x + x + 1\n"
RIGHT = "def double(x):\n    return 2 * x\n"
CHECK = "from calc import double\n\n\ndef test_double():\n    assert double(3) == 6\n"
F2P = ("tests/test_calc.py::test_double",)


@dataclass(frozen=True, kw_only=True)
class Honest:
    """One of them."""

    problem: SweProblem
    patch: str
    neutralised: tuple[str, ...] = ()
    """Exactly these paths are put back."""


def shop(patch: str, *, neutralised=(), **changes) -> Honest:
    """A patch of the shop."""
    return Honest(problem=problem(**changes), patch=patch, neutralised=neutralised)


def calc(files, *, mend=None, f2p=F2P, neutralised=(), **changes) -> Honest:
    """A project with one function that is wrong; `mend` is what the patch writes beside the function."""
    before = {"calc.py": BROKEN, "tests/test_calc.py": CHECK, **files}
    before = {path: text for path, text in before.items() if text is not None}
    after = {**before, **({"calc.py": RIGHT} if "calc.py" in before else {}), **(mend or {})}
    after = {path: text for path, text in after.items() if text is not None}
    fields = {"fail_to_pass": f2p, "pass_to_pass": (), **changes}
    return Honest(problem=problem(before, **fields), patch=diff(before, after), neutralised=neutralised)


def tests(text: str) -> dict[str, str]:
    return {"tests/test_calc.py": text}


def using(text: str) -> dict[str, str]:
    """A mend that does more than it must, in lines of its own."""
    return {"calc.py": text}


def _mend(folder: Path) -> None:
    (folder / "shop/cart.py").write_text(MENDED)


def _mend_and_rename(folder: Path) -> None:
    _mend(folder)
    (folder / "shop/cart.py").rename(folder / "shop/basket.py")
    (folder / "shop/cart.py").write_text("from shop.basket import cheapest, total\n")
    (folder / "shop/names.py").rename(folder / "shop/slugs.py")
    (folder / "shop/names.py").write_text("from shop.slugs import slug\n")


def _mend_and_allow(folder: Path) -> None:
    _mend(folder)
    (folder / "shop/names.py").chmod(0o755)


def _mend_with_picture(folder: Path) -> None:
    _mend(folder)
    (folder / "shop/logo.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(range(256)))


CONFTEST = "import pytest\n\n\n@pytest.fixture\ndef three():\n    return 3\n"
WITH_FIXTURE = "from calc import double\n\n\ndef test_double(three):\n    assert double(three) == 6\n"
MANY_FIXTURES = """
import os
import sys
from unittest import mock
import pytest
from calc import double

@pytest.fixture(scope="module")
def opened():
    seen = []
    yield seen
    seen.clear()

@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr("builtins.print", lambda *_: None)

def test_double(opened, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(sys, "exit", lambda code=0: None)
    with mock.patch("calc.double", return_value=6) as fake, mock.patch("builtins.open"):
        import calc
        assert calc.double(3) == 6 and fake.called
    assert double(3) == 6
"""
UNITTEST = """
import asyncio
import unittest
from unittest import mock
import calc

class CalcTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.three = 3
    def setUp(self):
        self.addCleanup(lambda: None)
    def test_double(self):
        for x in (1, 2, self.three):
            with self.subTest(x=x):
                self.assertEqual(calc.double(x), 2 * x)
    @unittest.expectedFailure
    def test_known(self):
        self.assertEqual(1, 2)
    @mock.patch.object(calc, "double", return_value=1)
    def test_mock(self, double):
        self.assertTrue(calc.double(1) == 1)

class AsyncTest(unittest.IsolatedAsyncioTestCase):
    async def test_double(self):
        await asyncio.sleep(0)
        self.assertEqual(calc.double(2), 4)
"""
FOREIGN = """
import pytest
from calc import double

@pytest.mark.parametrize("x", [1, 2], ids=["eins und zwei", "größer [als] a::b"])
def test_double(x):
    assert double(x) == 2 * x

@pytest.mark.skip(reason="later")
def test_later():
    pass

@pytest.mark.xfail
def test_known():
    assert False

class TestMore:
    def setup_method(self):
        self.x = 4
    def test_more(self):
        assert double(self.x) == pytest.approx(8.0)
        with pytest.raises(TypeError):
            double(None)
"""
PROCESSES = """
import multiprocessing, os, subprocess, sys, threading
from calc import double

def test_double(capfd):
    assert subprocess.run([sys.executable, "-c", "import calc; print(calc.double(3))"], capture_output=True, text=True).stdout == "6\\n"
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(double, [1, 2]) == [2, 4]
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    thread = threading.Thread(target=double, args=(1,))
    thread.start()
    thread.join()
    print("\\x00" + "loud" * 100000)
    os.write(1, bytes(range(256)))
"""
INTROSPECTIVE = """
import collections, contextlib, ctypes, dataclasses, enum, functools, inspect, logging, traceback, typing, uuid, warnings

Point = collections.namedtuple("Point", "x y")
Pair = typing.NamedTuple("Pair", [("x", int)])
Kind = enum.Enum("Kind", "ONE TWO")
log = logging.getLogger(__name__)

@dataclasses.dataclass
class Number:
    x: int
    def __eq__(self, other):
        return self.x == getattr(other, "x", other)

def double(x):
    try:
        if x is None:
            raise ValueError(x)
    except ValueError:
        traceback.format_exc()
        log.exception("no number")
        raise TypeError(x)
    warnings.warn("doubling", stacklevel=2)
    log.warning("doubling %s", inspect.signature(double))
    assert uuid.uuid4() and Point(1, 2).x and Kind.ONE and functools.partial(double) and Number(1) == Number(1)
    with contextlib.suppress(KeyError):
        {}["x"]
    return 2 * x
"""
OWN_EQUALITY = """
import dataclasses

class Number:
    def __init__(self, value):
        self.value = value
    def __eq__(self, other):
        return self.value == (other.value if isinstance(other, Number) else other)
    def __hash__(self):
        return hash(self.value)
    def __contains__(self, value):
        return value.bit_length() < self.value
    def __bool__(self):
        raise ValueError("a number is neither")

@dataclasses.dataclass
class Pair:
    one: object
    two: object

def double(x):
    return Number(2 * x)
"""
OWN_EQUALITY_TESTS = """
import unittest
from calc import double

def test_double():
    assert double(3) == 6
    assert [double(1), {"x": (double(2),)}] == [2, {"x": (4,)}]
    assert double(1) != 3

def test_in():
    from calc import Pair
    assert 3 in double(4) and Pair(1, 2) == Pair(1, 2) and Pair(1, 2) != Pair(2, 1) and 4 in [double(1), double(2)]

class OwnTest(unittest.TestCase):
    def test_double(self):
        self.assertEqual(double(3), 6)
        self.assertIn(double(3), [6])
"""
OLD_FRAMES = "import sys\n\n\ndef caller():\n    return sys._getframe(1).f_code.co_name\n\n\n"
REPORTING = """
import pytest

@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    item.report = outcome.get_result()

def pytest_collection_modifyitems(items):
    items.reverse()

@pytest.fixture(scope="session", autouse=True)
def session_wide():
    yield
    raise RuntimeError("a session that does not end well")
"""
GOLD_TESTS = {"tests/test_more.py": "from calc import double\n\n\ndef test_more():\n    assert double(5) == 10\n"}
PYPROJECT = '[project]\nname = "calc"\nversion = "1"\n\n[tool.pytest.ini_options]\npythonpath = ["src"]\naddopts = "-x --strict-markers"\n'
SETUP_CFG = "[metadata]\nname = calc\nversion = 1\n\n[tool:pytest]\nmarkers =\n    slow: takes long\nfilterwarnings = error\n"
SRC = {"calc.py": None, "src/calc/__init__.py": "from calc.core import double\n", "src/calc/core.py": BROKEN}

HONEST: dict[str, Honest] = {
    "the gold patch": shop(problem().gold_patch),
    "no final newline in the patch": shop(problem().gold_patch.rstrip("\n")),
    "no final newline in the file": shop(edit({"shop/cart.py": MENDED.rstrip("\n")})),
    "a file is made": shop(edit({"shop/cart.py": "from shop.sums import cheapest, total\n", "shop/sums.py": MENDED})),
    "a file is deleted": calc({"old.py": "x = 1\n"}, mend={"old.py": None}),
    "files are renamed": shop(by_git(_mend_and_rename, "-M")),
    "files are renamed, told as deleted and made": shop(by_git(_mend_and_rename, "--no-renames")),
    "a file becomes executable": shop(by_git(_mend_and_allow)),
    "a picture is added": shop(by_git(_mend_with_picture)),
    "words around the diff": shop("Subject: [PATCH] discounts\n\nIt was a sign.\n---\n" + problem().gold_patch + "-- \n2.39.5\n"),
    "src layout by pyproject": calc({**SRC, "pyproject.toml": PYPROJECT}, mend={"src/calc/core.py": RIGHT}),
    "pyproject gets a version and a dependency": calc(
        {**SRC, "pyproject.toml": PYPROJECT},
        mend={"src/calc/core.py": RIGHT, "pyproject.toml": PYPROJECT.replace('"1"', '"2"\ndependencies = ["attrs"]')},
    ),
    "setup.cfg gets a version": calc({"setup.cfg": SETUP_CFG}, mend={"setup.cfg": SETUP_CFG.replace("version = 1", "version = 2")}),
    "a new setup.cfg without pytest": calc({}, mend={"setup.cfg": "[metadata]\nname = calc\n"}),
    "setup.py and requirements": calc(
        {}, mend={"setup.py": "from setuptools import setup\n\nsetup(name='calc')\n", "requirements.txt": "attrs\n"}
    ),
    "other names for tests by pytest.ini": calc(
        {
            "tests/test_calc.py": None,
            "pytest.ini": "[pytest]\npython_files = check_*.py\npython_functions = check_*\n",
            "tests/check_calc.py": CHECK.replace("test_double", "check_double"),
        },
        f2p=("tests/check_calc.py::check_double",),
    ),
    "imports by importlib": calc({"pytest.ini": "[pytest]\naddopts = --import-mode=importlib\n"}),
    "plain asserts": calc({"tox.ini": "[pytest]\naddopts = --assert=plain\n"}),
    "tests are a package": calc(
        {"tests/__init__.py": "", "tests/unit/__init__.py": "", "tests/unit/test_calc.py": CHECK, "tests/test_calc.py": None},
        f2p=("tests/unit/test_calc.py::test_double",),
    ),
    "tests lie in the package": calc(
        {
            "tests/test_calc.py": None,
            "calc.py": None,
            "calc/__init__.py": BROKEN,
            "calc/tests/__init__.py": "",
            "calc/tests/test_calc.py": CHECK,
        },
        mend={"calc/__init__.py": RIGHT},
        f2p=("calc/tests/test_calc.py::test_double",),
        test_paths=("calc/tests",),
    ),
    "one test file at the root": calc(
        {"tests/test_calc.py": None, "test_calc.py": CHECK}, f2p=("test_calc.py::test_double",), test_paths=("test_calc.py",)
    ),
    "fixtures of the base's conftest": calc({"conftest.py": CONFTEST, **tests(WITH_FIXTURE)}),
    "fixtures of nested conftests": calc({"conftest.py": "", "tests/conftest.py": CONFTEST, **tests(WITH_FIXTURE)}),
    "a conftest that looks at reports and turns the order": calc(
        {"conftest.py": REPORTING, **GOLD_TESTS}, f2p=(*F2P, "tests/test_more.py::test_more")
    ),
    "a conftest that names a plugin of the project": calc(
        {"conftest.py": 'pytest_plugins = ["threes"]\n', "threes.py": CONFTEST, **tests(WITH_FIXTURE)}
    ),
    "the mend is in a plugin of the project": calc(
        {
            "conftest.py": 'pytest_plugins = ["threes"]\n',
            "threes.py": CONFTEST.replace("return 3", "return 4"),
            **tests(WITH_FIXTURE),
            "calc.py": RIGHT,
        },
        mend={"threes.py": CONFTEST},
    ),
    "many fixtures, and builtins patched inside a test": calc(tests(MANY_FIXTURES)),
    "unittest's classes": calc(
        tests(UNITTEST),
        f2p=("tests/test_calc.py::CalcTest::test_double", "tests/test_calc.py::AsyncTest::test_double"),
        pass_to_pass=("tests/test_calc.py::CalcTest::test_mock",),
    ),
    "names with spaces, brackets and umlauts": calc(
        tests(FOREIGN),
        f2p=(
            "tests/test_calc.py::test_double[eins und zwei]",
            "tests/test_calc.py::test_double[gr\\xf6\\xdfer [als] a::b]",
            "tests/test_calc.py::TestMore::test_more",
        ),
    ),
    "processes, forks, threads and loud output": calc(tests(PROCESSES)),
    "logging, tracebacks and named tuples in the mend": calc({}, mend=using(INTROSPECTIVE)),
    "an equality of one's own, in lists and in unittest": calc(
        tests(OWN_EQUALITY_TESTS),
        mend=using(OWN_EQUALITY),
        f2p=("tests/test_calc.py::test_double", "tests/test_calc.py::OwnTest::test_double", "tests/test_calc.py::test_in"),
    ),
    "frames in lines that were there": calc(
        {"calc.py": OLD_FRAMES + BROKEN}, mend={"calc.py": OLD_FRAMES + RIGHT.replace("2 * x", "2 * x if caller() else 0")}
    ),
    "modules of a package named as Python's": calc(
        {},
        mend={
            "calc.py": "from tools.types import double\n",
            "tools/__init__.py": "",
            "tools/types.py": RIGHT,
            "tools/json.py": "",
            "tools/pytest.py": "",
        },
    ),
    "the agent wrote tests of its own": calc(
        {},
        mend={"tests/test_own.py": "def test_own():\n    pass\n", "tests/test_calc.py": CHECK + "\n\ndef test_less():\n    pass\n"},
        neutralised=("tests/test_calc.py", "tests/test_own.py"),
    ),
    "the agent left a conftest and pytest's settings": calc(
        {}, mend={"conftest.py": "import sys\n", "pytest.ini": "[pytest]\n"}, neutralised=("conftest.py", "pytest.ini")
    ),
    "the tests come with a patch": calc({}, f2p=("tests/test_more.py::test_more",), test_patch=diff({}, GOLD_TESTS)),
    "the agent wrote the test that comes with a patch": calc(
        {},
        mend={"tests/test_more.py": "def test_more():\n    pass\n"},
        f2p=("tests/test_more.py::test_more",),
        test_patch=diff({}, GOLD_TESTS),
        neutralised=("tests/test_more.py",),
        test_paths=(),
    ),
    "another test file is broken": calc({"tests/test_broken.py": "import nothing_of_this_name\n"}, pass_to_pass=()),
    "names with spaces and umlauts": calc({"größen und maße/tabelle a.py": "x = 1\n"}, mend={"größen und maße/tabelle a.py": "x = 2\n"}),
    "set-up commands": calc(
        {"calc.py": BROKEN, **tests(CHECK + "\n\ndef test_made():\n    import made\n")}, setup_commands=("echo 'x = 1' > made.py",)
    ),
    "a long patch": shop(edit({"shop/cart.py": MENDED, "shop/table.py": "".join(f"X{n} = {n}\n" for n in range(20_000))})),
    "the mend is told twice in one diff": shop(problem().gold_patch + edit({"shop/extra.py": "x = 1\n"})),
}
