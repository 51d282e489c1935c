"""Small Python projects with one bug, drawn from shapes and words.

Invariant: the bug is on one line, the mend is one substitution on it, and every test's value was computed by the right function, so a
test fails before the mend exactly where the wrong function says otherwise.
"""

from __future__ import annotations

import difflib
import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from psrl.datasets.generators.swe_projects.names import MODULES, PACKAGES, PLURALS, RESULTS, SCALARS, TEXTS
from psrl.datasets.generators.swe_projects.shapes import SHAPES, SHAPES_BY_KIND, SYMPTOMS, BugKind, Shape
from psrl.types import SweProblem

TASK_KIND = "swe_tiny"
VAL_SHARE = 8
"""One buggy function in so many belongs to validation."""
NUM_DRAWS = 60
"""Of arguments, until enough of them tell right from wrong."""
SMALL = 5
"""Projects of so few functions have two tests of each."""
OPENINGS = ("In {path}, {function} {symptom}.", "{function} in {path} {symptom}.", "{function} ({path}) {symptom}, please mend it.")
EXAMPLE = " {call} should be {value}."
EXAMPLE_SHARE = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """One function of a project, right and (where it has been asked for) wrong."""

    shape: Shape
    name: str
    names: dict[str, str]
    """What the shape leaves open, by placeholder."""

    @property
    def right(self) -> str:
        """Its text without the bug."""
        return self._text(self.shape.right)

    @property
    def wrong(self) -> str:
        """Its text with the bug."""
        return self._text(self.shape.wrong)

    @property
    def edit(self) -> tuple[str, str]:
        """(piece with the bug, the same without)."""
        return self.shape.wrong.format_map(self.names), self.shape.right.format_map(self.names)

    def _text(self, piece: str) -> str:
        names = {**self.names, "fix": piece.format_map(self.names)}
        lines = [f'"""{self.shape.doc}"""', *self.shape.body]
        header = f"def {self.name}({self.shape.parameters}):"
        return "\n".join([header, *("    " + line for line in lines)]).format_map(names) + "\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A module with a bug, and the issue about it: all that an episode needs to know."""

    path: str
    """Of the module, such as `shop/cart.py`."""
    functions: tuple[Function, ...]
    bug: Function
    """One of `functions`."""
    statement: str
    has_example: bool
    """Whether the statement has one."""

    @property
    def is_val(self) -> bool:
        """Which split the bug belongs to; the function alone decides, so that no project around it makes it another bug."""
        return hashlib.sha256(self.bug.wrong.encode()).digest()[0] % VAL_SHARE == 0

    def text(self, *, is_mended: bool) -> str:
        """The module."""
        return module_text(self.path, [each.wrong if each is self.bug and not is_mended else each.right for each in self.functions])

    @property
    def gold_patch(self) -> str:
        """The mend as `git apply` takes it."""
        before, after = (self.text(is_mended=is_mended).splitlines(keepends=True) for is_mended in (False, True))
        return "".join(difflib.unified_diff(before, after, f"a/{self.path}", f"b/{self.path}"))


def draw_case(rng: random.Random, kind: BugKind, *, is_val: bool) -> Case:
    """A module with a bug of a kind, of the asked split."""
    while True:
        path = f"{rng.choice(PACKAGES)}/{rng.choice(MODULES)}.py"
        bug = draw_function(rng, rng.choice(SHAPES_BY_KIND[kind]))
        functions = [bug, *draw_functions(rng, rng.choice((1, 2)), taken=[bug.name])]
        rng.shuffle(functions)
        failing = failing_arguments(bug, rng)
        if failing is None:
            continue
        has_example = rng.random() < EXAMPLE_SHARE
        text = statement(rng, path, bug, failing if has_example else None)
        case = Case(path=path, functions=tuple(functions), bug=bug, statement=text, has_example=has_example)
        if case.is_val == is_val and case.text(is_mended=False).count(bug.edit[0]) == 1:
            return case


def draw_function(rng: random.Random, shape: Shape) -> Function:
    """A function of the shape, with names of its own."""
    a, b, noun = rng.sample(SCALARS, 3)
    (xs, x), (ys, _) = rng.sample(PLURALS, 2)
    n, m = rng.sample(range(2, 10), 2)
    names = {"a": a, "b": b, "xs": xs, "x": x, "ys": ys, "r": rng.choice(RESULTS), "n": str(n), "m": str(m)}
    return Function(shape=shape, name=f"{rng.choice(shape.verbs)}_{noun}", names=names)


def draw_functions(rng: random.Random, count: int, *, taken: list[str]) -> list[Function]:
    """Functions of any shape whose names are not `taken`; their names are added to it."""
    found: list[Function] = []
    while len(found) < count:
        function = draw_function(rng, rng.choice(SHAPES))
        if function.name not in taken:
            taken.append(function.name)
            found.append(function)
    return found


def statement(rng: random.Random, path: str, bug: Function, failing: tuple[str, str] | None) -> str:
    """The issue: where and what is noticed, and the example where there is one."""
    symptom = rng.choice(SYMPTOMS[bug.shape.kind])
    text = rng.choice(OPENINGS).format(path=path, function=bug.name, symptom=symptom)
    return text + (EXAMPLE.format(call=f"{bug.name}({failing[0]})", value=failing[1]) if failing is not None else "")


def problem_of(case: Case, rng: random.Random) -> SweProblem:
    """The whole project: other modules, tests of everything, packaging."""
    package, file = case.path.split("/")
    taken = [each.name for each in case.functions]
    modules = {case.path: list(case.functions)}
    for name in rng.sample([each for each in MODULES if each != file.removesuffix(".py")], rng.choice((1, 2, 3))):
        modules[f"{package}/{name}.py"] = draw_functions(rng, rng.choice((1, 2)), taken=taken)
    files = {
        "README.md": f"# {package}\n\nModules: {', '.join(sorted(path.split('/')[1] for path in modules))}. Tests: `python -m pytest`.\n",
        "pyproject.toml": f'[project]\nname = "{package}"\nversion = "1.0"\n\n[tool.pytest.ini_options]\ntestpaths = ["tests"]\n',
        f"{package}/__init__.py": f'"""The {package}."""\n',
        "tests/__init__.py": f'"""Tests of the {package}."""\n',
    }
    is_small = sum(map(len, modules.values())) <= SMALL
    failing: list[str] = []
    passing: list[str] = []

    def count_of(function: Function) -> tuple[int, int]:
        return (2, 1) if function is case.bug else (0, 2) if is_small else (0, 1)

    for path, functions in modules.items():
        files[path] = case.text(is_mended=False) if path == case.path else module_text(path, [each.right for each in functions])
        module = path.split("/")[1].removesuffix(".py")
        tests = [(function, *each) for function in functions for each in tests_of(function, rng, count=count_of(function))]
        test_path = f"tests/test_{module}.py"
        files[test_path] = tests_text(package, module, tests)
        for function, name, _, fails in tests:
            (failing if fails and function is case.bug else passing).append(f"{test_path}::{name}")
    digest = hashlib.sha256("".join(f"{path}\0{text}\0" for path, text in sorted(files.items())).encode()).hexdigest()
    return SweProblem(
        instance_id=f"{TASK_KIND}-{digest[:16]}",
        repo=package,
        task_kind=TASK_KIND,
        statement=case.statement,
        files=files,
        gold_patch=case.gold_patch,
        test_paths=("tests",),
        fail_to_pass=tuple(failing),
        pass_to_pass=tuple(passing),
    )


def module_text(path: str, functions: Sequence[str]) -> str:
    """A module of functions."""
    package, file = path.split("/")
    return f'"""The {file.removesuffix(".py")} of the {package}."""\n\n\n' + "\n\n".join(functions)


def tests_of(function: Function, rng: random.Random, *, count: tuple[int, int]) -> list[tuple[str, str, bool]]:
    """(name, assertion, whether the wrong function fails it), at most `count` (failing, other) of them."""
    failing, passing = compared(function, rng)
    chosen = failing[: count[0]]
    chosen += [case for case in (*passing, *failing) if case not in chosen][: count[1]]
    return [
        (f"test_{function.name}_{index}", f"assert {function.name}({arguments}) == {value}", (arguments, value) in failing)
        for index, (arguments, value) in enumerate(chosen, start=1)
    ]


def tests_text(package: str, module: str, tests: Sequence[tuple[Function, str, str, bool]]) -> str:
    """A file of tests."""
    names = ", ".join(sorted({function.name for function, *_ in tests}))
    parts = [f"def {name}():\n    {assertion}\n" for _, name, assertion, _ in tests]
    return f'"""Tests of {package}.{module}."""\n\nfrom {package}.{module} import {names}\n\n\n' + "\n\n".join(parts)


def failing_arguments(function: Function, rng: random.Random) -> tuple[str, str] | None:
    """(arguments, right value) on which the wrong function says otherwise; None where no such were drawn."""
    failing, _ = compared(function, rng, enough=1)
    return failing[0] if failing else None


def compared(function: Function, rng: random.Random, *, enough: int = 2) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(arguments with their right value that the wrong function fails, and that it passes), some of each where there are some."""
    right, wrong = (_made(text, function.name) for text in (function.right, function.wrong))
    failing: list[tuple[str, str]] = []
    passing: list[tuple[str, str]] = []
    for _ in range(NUM_DRAWS):
        values = [draw_value(rng, kind) for kind in function.shape.arguments]
        expected = right(*values)
        try:
            fails = wrong(*values) != expected
        except (IndexError, ZeroDivisionError):
            fails = True
        case = (", ".join(map(repr, values)), repr(expected))
        found = failing if fails else passing
        if case not in found:
            found.append(case)
        if len(failing) >= enough and (passing or enough == 1):
            break
    return failing, passing


def _made(text: str, name: str) -> Callable[..., object]:
    """The function of a text that this module wrote."""
    space: dict[str, Any] = {}
    exec(text, space)
    made: Callable[..., object] = space[name]
    return made


def draw_value(rng: random.Random, kind: str) -> object:
    """An argument for a test."""
    match kind:
        case "int":
            return rng.randint(0, 9)
        case "pos":
            return rng.randint(1, 5)
        case "small":
            return rng.randint(1, 4)
        case "big":
            return rng.randint(0, 20)
        case "ints":
            return [rng.randint(1, 9) for _ in range(rng.randint(1, 4))]
        case "lists":
            return [[rng.randint(1, 9)] for _ in range(rng.randint(0, 3))]
        case "text":
            return rng.choice(TEXTS)
        case "caps":
            return rng.choice(TEXTS).upper()
        case "texts":
            return rng.sample(TEXTS, rng.randint(1, 3))
        case "gaps":
            return [rng.choice(("", *TEXTS)) for _ in range(rng.randint(0, 3))]
        case "letter":
            return rng.choice("abcdefghilmor")
    raise AssertionError(f"no argument of kind {kind!r}")
