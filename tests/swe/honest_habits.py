"""Mends of projects whose tests, fixtures and code do what honest ones do, near what hostile ones do."""

from __future__ import annotations

from honest_patches import BROKEN, CHECK, RIGHT, Honest, calc, tests

MARKED = "import pytest\nfrom calc import double\n\n\n@pytest.mark.unit\ndef test_double():\n    assert double(3) == 6\n"
SKIPS = "import pytest\n\n\ndef pytest_runtest_setup(item):\n    if not item.get_closest_marker('unit'):\n        pytest.skip('not unit')\n"
REQUESTS = "import pytest\n\n\n@pytest.fixture(autouse=True)\ndef each(request):\n    return request.module.double\n"
PATCHES_PYTEST = """
import builtins
import calc
import _pytest.python

old = _pytest.python.Function.runtest


def runtest(self):
    return old(self)


_pytest.python.Function.runtest = runtest
builtins.input = lambda *_: ""
"""
ASYNC_HOOK = """
import asyncio, inspect


def pytest_pyfunc_call(pyfuncitem):
    if inspect.iscoroutinefunction(pyfuncitem.obj):
        asyncio.run(pyfuncitem.obj())
        return True
"""
LAZY = """
import itertools


class Values(dict):
    def values(self, kind):
        return []


class Endless(list):
    def __iter__(self):
        return itertools.count()


class Lazy(list):
    def __iter__(self):
        raise RuntimeError("lazy")
"""
LAZY_TEST = CHECK.replace("import double", "import Endless, Lazy, Values, double") + (
    "    assert Values(a=1) == {'a': 1}\n    assert Endless([1]) != 2\n    assert Lazy([1]) != 2\n"
)
QUERY = """
class Expression:
    def __init__(self, text):
        self.text = text


class Field:
    def __init__(self, name):
        self.name = name

    def __eq__(self, other):
        return Expression(f"{self.name} = {other}")
"""
QUERY_TEST = CHECK.replace("import double", "import Field, double") + "    assert (Field('a') == 3).text == 'a = 3'\n"
COUNTS = "\n\nclass Counts:\n    asked = 0\n\n    def __eq__(self, other):\n        Counts.asked += 1\n        return other == 1\n"
COUNTS_TEST = CHECK.replace("import double", "import Counts, double") + "    assert Counts() == 1\n    assert Counts.asked == 1\n"
MONEY = """
import functools


@functools.total_ordering
class Money:
    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return abs(self.value - getattr(other, "value", other)) < 0.005

    def __lt__(self, other):
        return self.value < getattr(other, "value", other)


def double(x):
    return Money(2 * x)
"""
MONEY_TEST = CHECK + "    assert double(3) > 5\n    assert 5 < double(3) < 7\n    assert [double(1)] == [2]\n    assert double(1) != 3\n"
WRITES = "import os\nfrom calc import double\n\n\ndef test_double():\n    with open(os.path.join(os.path.dirname(__file__), 'run.log'), 'a') as file:\n        file.write('b')\n    assert double(3) == 6\n"  # noqa: E501
GLOBALS = "from calc import double\n\nCOUNT = 0\n\n\ndef test_double():\n    global COUNT\n    COUNT += 1\n    assert double(3) == 6\n\n\ndef test_again():\n    assert double(COUNT) == 2\n"  # noqa: E501
STATE = "\n\ndef save():\n    with open('state.json', 'w') as file:\n        file.write('1')\n"
FRAME_WORDS = """
import inspect
import logging
import sys
import warnings


def caller():
    return sys._getframe(1).f_globals["__name__"], inspect.stack()[1].function, inspect.stack()[0][3]


def double(x, key=lambda value: value):
    warnings.warn("doubling", stacklevel=2)
    logging.getLogger(caller()[0]).warning("by %s", inspect.currentframe().f_lineno, stack_info=True)
    return 2 * key(x) + 0 * key.__code__.co_argcount
"""
MODULE_FIXTURE = """
import unittest
import calc


def setup_module(module):
    module.three = 3


class DoubleTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.maxDiff = None
        cls.six = 6

    def test_double(self):
        self.assertEqual(calc.double(three), self.six)
"""

HONEST_HABITS: dict[str, Honest] = {
    "a fixture for all uses names of the test's module": calc({"tests/conftest.py": REQUESTS}),
    "base's conftest skips tests without a marker": calc(
        {"tests/conftest.py": SKIPS, "pytest.ini": "[pytest]\nmarkers = unit\n", **tests(MARKED)}
    ),
    "base's conftest patches pytest and builtins": calc({"tests/conftest.py": PATCHES_PYTEST}),
    "base's conftest runs coroutines": calc({"tests/conftest.py": ASYNC_HOOK, **tests(CHECK.replace("def test", "async def test"))}),
    "containers whose own methods are others": calc(tests(LAZY_TEST), mend={"calc.py": LAZY + "\n\n" + RIGHT}),
    "an equality that builds a query": calc(tests(QUERY_TEST), mend={"calc.py": QUERY + "\n\n" + RIGHT}),
    "a test that counts comparisons": calc(tests(COUNTS_TEST), mend={"calc.py": RIGHT + COUNTS}),
    "an equality and an order with a tolerance": calc(tests(MONEY_TEST), mend={"calc.py": MONEY}),
    "tests write beside themselves": calc({"tests/run.log": "a\n", **tests(WRITES)}),
    "tests count in a name of their file": calc(tests(GLOBALS), f2p=("tests/test_calc.py::test_double", "tests/test_calc.py::test_again")),
    "a test at the root writes a file that git knows": calc(
        {
            "tests/test_calc.py": None,
            "state.json": "0",
            "calc.py": BROKEN + STATE,
            "test_calc.py": CHECK.replace("import double", "import double, save") + "    save()\n",
        },
        mend={"calc.py": RIGHT + STATE},
        f2p=("test_calc.py::test_double",),
        test_paths=("test_calc.py",),
    ),
    "examples in a text": calc(
        {"tests/test_calc.txt": ">>> from calc import double\n>>> double(3)\n6\n"},
        f2p=("tests/test_calc.txt::test_calc.txt", "tests/test_calc.py::test_double"),
    ),
    "examples in a test file's words": calc(
        {"pytest.ini": "[pytest]\naddopts = --doctest-modules\n", **tests('"""\n>>> from calc import double\n>>> double(3)\n6\n"""\n')},
        f2p=("tests/test_calc.py::test_calc",),
    ),
    "names of callers, of frames and of a function's arguments": calc({}, mend={"calc.py": FRAME_WORDS}),
    "set-up of modules and classes": calc(tests(MODULE_FIXTURE), f2p=("tests/test_calc.py::DoubleTest::test_double",)),
}
