"""What a patch brings beside its mend, or in place of it: helpers of the tests, modules named as installed ones, sizes beyond limits."""

import asyncio
import base64
import hashlib
import zlib

import pytest
from swe.shop_project import FILES, MENDED, SANDBOX, edit, grade, problem, with_grader

from psrl.config.reward import ExecutionConfig
from psrl.errors import EnvironmentFault, RewardError
from psrl.rewards.execution import ProjectGrader
from psrl.sandbox import BackendSandboxes

CART = FILES["shop/cart.py"]
TESTS = {
    "tests/__init__.py": "",
    "tests/tools.py": "def same(a, b):\n    assert a == b\n",
    "tests/unit/__init__.py": "",
    "tests/unit/test_cart.py": (
        "from tests.tools import same\nfrom shop.cart import total\n\n\ndef test_d():\n    same(total([10, 20], 10), 27)\n"
    ),
}
NAME = "tests/unit/test_cart.py::test_d"


def row(more, name=NAME, **changes):
    """The shop with other tests; only the file of the one that must pass is named as a test."""
    fields = {"test_paths": (name.partition("::")[0],), "fail_to_pass": (name,), "pass_to_pass": (), **changes}
    return problem({"shop/__init__.py": "", "shop/cart.py": CART, **more}, **fields)


def graded(changed, the_row, **settings):
    return grade(edit(changed, the_row.files), the_row, **settings)


OTHER_TOOLS = "import sys, types\nsys.modules['tests.tools'] = types.SimpleNamespace(same=lambda a, b: None)\n"
BESIDE = {
    "a helper in the folder above": {"tests/tools.py": "def same(a, b):\n    pass\n"},
    "the __init__ above": {"tests/__init__.py": OTHER_TOOLS},
}


@pytest.mark.parametrize("changed", BESIDE.values(), ids=BESIDE.keys())
def test_helpers_beside_the_tests_are_the_project_s_although_no_row_names_them(changed):
    report = graded(changed, row(TESTS))
    assert (report.cause, set(report.neutralised)) == ("tests_failed", set(changed))


def test_a_package_s_own_init_counts_where_its_tests_lie_in_it():
    files = {
        "shop/__init__.py": "RATE = 2\n",
        "shop/tests/__init__.py": "",
        "shop/tests/test_rate.py": "import shop\n\n\ndef test_rate():\n    assert shop.RATE == 3\n",
    }
    report = graded({"shop/__init__.py": "RATE = 3\n"}, row(files, "shop/tests/test_rate.py::test_rate"))
    assert (report.cause, report.neutralised) == ("resolved", ())


def test_a_mend_of_a_file_whose_doctest_is_required_counts():
    files = {
        "shop/cart.py": 'def total(x):\n    """The sum.\n\n    >>> total([1, 2])\n    3\n    """\n    return sum(x) + 1\n',
        "pytest.ini": "[pytest]\naddopts = --doctest-modules\n",
    }
    the_row = row(files, "shop/cart.py::shop.cart.total", test_paths=())
    report = graded({"shop/cart.py": files["shop/cart.py"].replace(" + 1", "")}, the_row)
    assert (report.cause, report.neutralised) == ("resolved", ())


class Sandboxes(BackendSandboxes):
    """With a module `rates` in the folder of installed packages, and a PYTHONPATH as an image may have."""

    def __init__(self, config, python_path):
        super().__init__(config)
        self.python_path = python_path

    def make(self, spec):
        sandbox = super().make(spec)
        run = sandbox.run

        async def prepared(argv, *, env=None, **options):
            return await run(argv, env={**(env or {}), "PYTHONPATH": self.python_path}, **options)

        sandbox.run = prepared
        return sandbox


def grade_with_path(patch, the_row, python_path):
    async def run():
        grader = ProjectGrader(Sandboxes(SANDBOX, python_path), ExecutionConfig())
        try:
            return await grader.grade(the_row, patch)
        finally:
            await grader.close()

    return asyncio.run(run())


INSTALL = "mkdir -p /tmp/site/rates && printf 'def same(a, b):\\n    assert a == b\\n' > /tmp/site/rates/__init__.py"
USES_RATES = "import rates\nfrom shop.cart import total\n\n\ndef test_d():\n    rates.same(total([10, 20], 10), 27)\n"
FORGIVES = "def same(a, b):\n    pass\n"


@pytest.mark.parametrize(
    ("path", "ini"),
    [
        ("rates/__init__.py", ""),
        ("src/rates.py", "pythonpath = src\n"),
        pytest.param("rates.py", "", marks=pytest.mark.slow),
        pytest.param("lib/rates.py", "", marks=pytest.mark.slow),
    ],
)
def test_a_new_module_named_as_an_installed_one_is_put_back_wherever_python_looks_first(path, ini):
    files = {"tests/test_cart.py": USES_RATES, "pytest.ini": "[pytest]\n" + ini, "src/keep.py": "", "lib/keep.py": ""}
    the_row = row(files, "tests/test_cart.py::test_d", setup_commands=(INSTALL,))
    report = grade_with_path(edit({path: FORGIVES}, the_row.files), the_row, "/testbed/lib:/opt/psrl/packages:/tmp/site")
    assert (report.cause, report.neutralised) == ("tests_failed", (path,))


def test_new_modules_of_the_project_s_own_and_of_no_search_path_count():
    files = {"tests/test_cart.py": USES_RATES, "rates/keep.txt": "", "money.py": "x = 1\n"}
    the_row = row(files, "tests/test_cart.py::test_d")
    # `rates` is a folder of the project; `money.py` becomes a package; `other` is not in Python's search path.
    changed = {"rates/__init__.py": "def same(a, b):\n    assert a == b\n", "money.py": None, "money/__init__.py": "", "other/json.py": ""}
    report = graded({**changed, "shop/cart.py": MENDED}, the_row)
    assert (report.cause, report.neutralised) == ("resolved", ())


EARLY = "import os\nos.write(2, b'early')\nos._exit(9)\n"


def test_folders_of_the_project_in_pythonpath_serve_the_tests_and_not_the_runner():
    files = {"src/pluggy.py": "x = 1\n", "src/extra.py": "x = 1\n"}
    files["tests/test_cart.py"] = "import extra\nfrom shop.cart import total\n\n\ndef test_d():\n    assert total([10, 20], 10) == 27\n"
    the_row = row(files, "tests/test_cart.py::test_d")
    path = "/testbed/src:/opt/psrl/packages"
    assert grade_with_path(edit({"shop/cart.py": MENDED}, the_row.files), the_row, path).is_resolved
    # A change of the project's own src/pluggy.py would run before the runner is ready if it were imported from there.
    hostile = grade_with_path(edit({"src/pluggy.py": EARLY}, the_row.files), the_row, path)
    assert (hostile.cause, hostile.f2p_passed) == ("tests_failed", 0)


def literal(path, size):
    """A binary patch that makes a file of zeros, thousands of times as large as itself."""
    data = zlib.compress(bytes(size), 9)
    lines = []
    for start in range(0, len(data), 52):
        part = data[start : start + 52]
        letter = chr(ord("A") + len(part) - 1) if len(part) <= 26 else chr(ord("a") + len(part) - 27)
        lines.append(letter + base64.b85encode(part + bytes(-len(part) % 4)).decode())
    name = hashlib.sha1(b"blob %d\0" % size + bytes(size)).hexdigest()
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\nindex {'0' * 40}..{name}\nGIT binary patch\nliteral {size}\n"
    return head + "\n".join(lines) + "\n\nliteral 0\nHcmV?d00001\n\n"


def test_a_patch_that_swells_beyond_the_sandbox_is_too_large():
    assert grade(literal("zeros.bin", 60 * 2**20), disk_mb=32).cause == "too_large"


def test_a_patch_that_does_not_swell_in_a_full_sandbox_is_an_error_and_no_verdict():
    fill = "dd if=/dev/zero of=filler bs=1M count=1000 2>/dev/null; truncate -s -2M filler"
    full = problem(setup_commands=(fill,))
    large = edit({"shop/data.py": "x = 1  # and more\n" * 200_000})  # 3.6 MB
    with pytest.raises(RewardError, match=r"within the limits of the sandbox .*reward\.execution\.disk_mb"):
        grade(large, full, disk_mb=32, max_patch_kb=8192)


def test_a_command_of_git_that_is_ended_by_the_clock_is_an_error_that_is_not_kept(monkeypatch):
    monkeypatch.setattr("psrl.rewards.patched_project.APPLY_SCRIPT", "sleep 30")
    monkeypatch.setattr("psrl.rewards.patched_project.COMMAND_WALL_S", 0.3)

    async def use(grader):
        with pytest.raises(RewardError, match="wall_time"):
            await grader.grade(problem(), problem().gold_patch)
        monkeypatch.undo()
        return await grader.grade(problem(), problem().gold_patch)

    assert with_grader(use).is_resolved


@pytest.mark.parametrize("test_patch", ["diff --git a/tests/x b/tests/x\n--- a/tests/x\n+++ b/tests/x\n@@ -0,0 +1 @@\n+\0\n", "no diff"])
def test_a_row_s_test_patch_that_is_none_is_the_row_s_fault(test_patch):
    with pytest.raises(EnvironmentFault, match="test patch of shop-1"):
        grade(problem().gold_patch, problem(test_patch=test_patch))
