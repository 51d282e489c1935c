"""What is said of a patch before it is used, and of its files."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shop_project import edit, problem

from psrl.swe.hygiene import configures, folders_of_tests, is_same_test_configuration, is_test_path, module_at
from psrl.swe.patch import PatchRefusedError, changes_of, check_patch, is_outside


def refusal(patch, max_bytes=10_000):
    with pytest.raises(PatchRefusedError) as caught:
        check_patch(patch, max_bytes=max_bytes)
    return caught.value.cause.value


def test_added_lines_are_those_of_the_file_after_the_patch():
    patch = "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1,4 +1,5 @@\n a\n-b\n+B\n+C\n c\n d\n@@ -10,2 +11,3 @@\n j\n k\n+l\n"
    assert check_patch(patch, max_bytes=1000).added_lines == {"x.py": ((2, 3), (13, 13))}


def test_a_missing_final_newline_is_mended_and_nothing_else():
    gold = problem().gold_patch
    assert check_patch(gold.rstrip("\n"), max_bytes=10_000).content == gold.encode()
    assert check_patch(gold, max_bytes=10_000).content == gold.encode()


@pytest.mark.parametrize("patch", ["", "\n", "  \n\n"])
def test_nothing_is_an_empty_patch(patch):
    assert refusal(patch) == "empty_patch"


def test_the_limit_is_of_bytes_and_not_of_letters():
    patch = edit({"shop/names.py": "x = '" + "ü" * 300 + "'\n"})
    assert refusal(patch, max_bytes=len(patch) + 100) == "too_large"
    assert check_patch(patch, max_bytes=len(patch.encode())).content == patch.encode()


def test_a_patch_of_very_many_files_is_too_large():
    patch = "".join(f"diff --git a/{n} b/{n}\nold mode 100644\nnew mode 100755\n" for n in range(1001))
    assert refusal(patch, max_bytes=10**6) == "too_large"


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/x", ".git/x", "a/.git/hooks/x", ".Git/x", "./x", "a//x", "git~1/x"])
def test_paths_that_leave_the_project_are_outside(path):
    assert is_outside(path)


@pytest.mark.parametrize("path", ["a", ".github/x", "a/.gitignore", "..a/x", "a..b", "x/.gitkeep"])
def test_other_paths_are_inside(path):
    assert not is_outside(path)


@given(st.text(max_size=200))
def test_any_text_is_checked_or_refused_with_a_cause(text):
    for patch in (text, "diff --git a/x b/x\n" + text, problem().gold_patch + text):
        with contextlib.suppress(PatchRefusedError):  # any other error fails the test
            assert check_patch(patch, max_bytes=10_000).content.endswith(b"\n")


ZEROS = "0" * 40


@pytest.mark.parametrize(
    ("raw", "cause"),
    [
        (f":000000 120000 {ZEROS} {ZEROS} A\0link\0", "forbidden_path"),
        (f":120000 100644 {ZEROS} {ZEROS} T\0link\0", "forbidden_path"),
        (f":000000 160000 {ZEROS} {ZEROS} A\0module\0", "forbidden_path"),
        (f":100644 100644 {ZEROS} {ZEROS} M\0.git/config\0", "forbidden_path"),
        ("".join(f":000000 100644 {ZEROS} {ZEROS} A\0{n}\0" for n in range(1001)), "too_large"),
    ],
)
def test_what_git_says_after_the_patch_is_held_to_the_same_rules(raw, cause):
    with pytest.raises(PatchRefusedError) as caught:
        changes_of(raw.encode())
    assert caught.value.cause == cause


def test_changes_are_read_as_git_prints_them():
    found = changes_of(f":000000 100644 {ZEROS} {ZEROS} A\0a b\nc\0:100644 000000 {ZEROS} {ZEROS} D\0gr\u00f6\u00dfe\0".encode())
    assert [(change.path, change.is_new, change.mode) for change in found] == [("a b\nc", True, "100644"), ("größe", False, "000000")]


@pytest.mark.parametrize(
    "path",
    ["conftest.py", "a/b/conftest.py", "pytest.ini", "a/.pytest.ini", "tox.ini", "sitecustomize.py", "x/usercustomize.py", "a.pth",
     "b/c.egg-link",
     "a/__pycache__/b.cpython-311.pyc", "b.pyc", "shop.egg-info/entry_points.txt", "x-1.dist-info/RECORD", ".gitattributes",
     "conftest.cpython-311-x86_64-linux-gnu.so"],
)  # fmt: skip
def test_files_that_say_how_tests_are_run_are_known_by_their_names(path):
    assert configures(path)


@pytest.mark.parametrize(
    "path", ["a/conftest.txt", "myconftest.py", "pytest.ini.md", "shop/site.py", "docs/tox.rst", "setup.py", "egg-info/x"]
)
def test_other_files_are_left_alone(path):
    assert not configures(path)


def test_the_module_that_a_file_belongs_to_is_named_by_the_entry_of_the_search_path():
    library = "json.cpython-311-x86_64-linux-gnu.so"
    assert [module_at(path, "") for path in ("json.py", "unittest/case.py", library, "README.md", "json.md", "a-b/c.py")] == [
        ("json", "json.py"), ("unittest", "unittest"), ("json", library), None, None, None
    ]  # fmt: skip
    assert module_at("src/numpy/x.py", "src") == ("numpy", "src/numpy")
    assert [module_at(path, "src") for path in ("numpy/x.py", "srcs/x.py", "src/README")] == [None] * 3


def test_folders_of_tests_are_the_topmost_ones_so_named():
    # A package's own `testing` is code; with tests of it below, only those are tests. pytest keeps all of its tests in `testing`.
    paths = {
        "tests/unit/test_a.py": ("tests",),
        "lib/Tests/test/test_a.py": ("lib/Tests",),
        "numpy/testing/tests/test_utils.py": ("numpy/testing/tests",),
        "testing/test_a.py": ("testing",),
        "shop/test_cart.py": (),
        "tests.py": (),
        "tests": ("tests",),
    }
    assert {path: folders_of_tests([path]) for path in paths} == paths


def test_test_paths_are_files_and_folders_and_what_stands_in_their_way():
    paths = ("tests/", "shop/test_x.py")
    assert [is_test_path(path, paths) for path in ("tests/a.py", "tests", "shop/test_x.py", "shop/test_x.py/y", "shop")] == [True] * 5
    assert [is_test_path(path, paths) for path in ("tests2/a.py", "shop/test_xy.py", "x/tests/a.py")] == [False] * 3


PROJECT = b'[project]\nversion = "1"\n[tool.pytest.ini_options]\naddopts = "-q"\n'


@pytest.mark.parametrize(
    ("path", "before", "after", "is_same"),
    [
        ("pyproject.toml", PROJECT, PROJECT.replace(b'"1"', b'"2"'), True),
        ("pyproject.toml", PROJECT, PROJECT.replace(b"-q", b"-p x"), False),
        ("pyproject.toml", PROJECT, b"", False),
        ("pyproject.toml", PROJECT, b"not = = toml", False),
        ("pyproject.toml", b"", b'[tool.coverage.run]\nplugins = ["x"]\n', False),
        ("pyproject.toml", b"", b"tool = 1\n", False),
        ("pyproject.toml", b"", b"[" * 100_000, False),
        ("setup.cfg", b"[metadata]\nname = a\n", b"[metadata]\nname = b\n", True),
        ("setup.cfg", b"[metadata]\nname = a\n", b"[metadata]\nname = a\n[tool:pytest]\naddopts = -p x\n", False),
        ("setup.cfg", b"", b"[tool:pytest]\n[tool:pytest]\n", False),
        ("setup.cfg", b"", b"\xff", False),
    ],
)
def test_a_mixed_file_is_put_back_only_where_it_says_something_else_of_pytest(path, before, after, is_same):
    assert is_same_test_configuration(path, before, after) is is_same
