"""A small project with a bug, and what the tests of grading do to it."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Mapping

from psrl.config.reward import ExecutionConfig
from psrl.config.sandbox import SandboxConfig
from psrl.rewards.execution import ProjectGrader
from psrl.sandbox import BackendSandboxes
from psrl.types import SweProblem

SANDBOX = SandboxConfig(packages=["pytest"])
FILES = {
    "shop/__init__.py": "",
    "shop/cart.py": (
        "def total(prices, discount=0):\n"
        '    """The sum of the prices, less a discount in percent."""\n'
        "    return sum(prices) * (100 + discount) / 100\n"
        "\n\n"
        "def cheapest(prices):\n"
        "    return min(prices)\n"
    ),
    "shop/names.py": 'def slug(name):\n    return name.strip().lower().replace(" ", "-")\n',
    "tests/test_cart.py": (
        "import pytest\n"
        "from shop.cart import cheapest, total\n"
        "\n\n"
        "def test_discount():\n"
        "    assert total([10, 20], 10) == 27\n"
        "\n\n"
        '@pytest.mark.parametrize("percent, left", [(50, 5), (100, 0)], ids=["half off", "free"])\n'
        "def test_discounts(percent, left):\n"
        "    assert total([10], percent) == left\n"
        "\n\n"
        "def test_sum():\n"
        "    assert total([1, 2]) == 3\n"
        "\n\n"
        "def test_cheapest():\n"
        "    assert cheapest([3, 1]) == 1\n"
    ),
    "tests/test_names.py": (
        "import unittest\n"
        "from shop.names import slug\n"
        "\n\n"
        "class SlugTest(unittest.TestCase):\n"
        "    def test_slug(self):\n"
        '        self.assertEqual(slug(" Red Hat "), "red-hat")\n'
    ),
}
MENDED = FILES["shop/cart.py"].replace("100 + discount", "100 - discount")
FAIL_TO_PASS = (
    "tests/test_cart.py::test_discount",
    "tests/test_cart.py::test_discounts[half off]",
    "tests/test_cart.py::test_discounts[free]",
)
PASS_TO_PASS = ("tests/test_cart.py::test_sum", "tests/test_cart.py::test_cheapest", "tests/test_names.py::SlugTest::test_slug")


def diff(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """The patch from one set of files to another, as `git diff` writes it."""
    parts = []
    for path in sorted({*before, *after}):
        old, new = before.get(path), after.get(path)
        if old == new:
            continue
        parts.append(f"diff --git a/{path} b/{path}\n")
        parts += ["new file mode 100644\n"] if old is None else ["deleted file mode 100644\n"] if new is None else []
        names = ("/dev/null" if old is None else f"a/{path}", "/dev/null" if new is None else f"b/{path}")
        for line in difflib.unified_diff((old or "").splitlines(True), (new or "").splitlines(True), *names):
            parts.append(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")
    return "".join(parts)


def problem(files: Mapping[str, str] = FILES, **changes: object) -> SweProblem:
    """The shop's problem, or one of other files."""
    fields = {
        "instance_id": "shop-1",
        "repo": "shop",
        "task_kind": "swe_tiny",
        "statement": "Discounts make things dearer.",
        "files": dict(files),
        "gold_patch": diff(FILES, {**FILES, "shop/cart.py": MENDED}),
        "test_paths": ("tests",),
        "fail_to_pass": FAIL_TO_PASS,
        "pass_to_pass": PASS_TO_PASS,
        "timeout_s": 30.0,
    }
    return SweProblem(**{**fields, **changes})


def edit(changed: Mapping[str, str | None], files: Mapping[str, str] = FILES) -> str:
    """The patch that writes (None: deletes) files."""
    after = {path: text for path, text in {**files, **changed}.items() if text is not None}
    return diff(files, after)


def with_grader(use, sandbox: SandboxConfig = SANDBOX, **settings):
    """What `use(grader)` gives, with real sandboxes."""

    async def run():
        grader = ProjectGrader(BackendSandboxes(sandbox), ExecutionConfig(**settings), num_concurrent=2)
        try:
            return await use(grader)
        finally:
            await grader.close()

    return asyncio.run(run())


def grade(patch: str, the_problem: SweProblem | None = None, **settings):
    """The verdict on one patch."""
    return with_grader(lambda grader: grader.grade(the_problem or problem(), patch), **settings)


def on_pytest(version: str, patch: str):
    """The verdict on one patch of the shop, by a pytest of that version."""
    sandbox = SandboxConfig(packages=[f"pytest=={version}"])
    return with_grader(lambda grader: grader.grade(problem(), patch), sandbox)
