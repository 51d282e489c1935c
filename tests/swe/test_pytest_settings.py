"""A project's own settings of pytest hold, and none of them spreads, cuts short, repeats or measures the run."""

import shlex

import pytest
from shop_project import FAIL_TO_PASS, FILES, grade, problem

from psrl.swe.pytest_settings import files_to_read, kept_options, settings_of

DROPPED = [
    "-n 2", "-n2", "-n auto --dist loadfile", "--numprocesses=4", "--forked", "-x", "--exitfirst", "--maxfail=1", "--maxfail 1", "--sw",
    "--stepwise", "--lf --ff", "--cov", "--cov=shop", "--cov shop --cov-report term-missing --cov-fail-under=90", "--no-cov", "--reruns 2",
    "--timeout=5 --timeout-method=thread", "--rootdir=tests", "-p xdist", "-pxdist", "--junitxml=x.xml", "--assert=plain", "-c other.ini",
]  # fmt: skip
KEPT = [
    "-q", "-ra", "--import-mode=importlib", "--import-mode append", "-p my.plugin", "-pmy.plugin", "-p no:doctest", "-m 'not slow'",
    "-k 'a or b'", "-W error", "--strict-markers", "--doctest-modules", "--runslow", "--ds=shop.settings", "-o xfail_strict=true", "-s",
    "--asyncio-mode=auto", "-vv", "tests", "--ignore x",
]  # fmt: skip


@pytest.mark.parametrize("options", DROPPED)
def test_what_shapes_a_run_is_dropped_and_the_rest_stays_beside_it(options):
    assert kept_options(["-q", *shlex.split(options), "--strict-markers"]) == ["-q", "--strict-markers"]


@pytest.mark.parametrize("options", KEPT)
def test_what_the_tests_need_is_kept_as_it_stands(options):
    assert kept_options(["-x", *shlex.split(options), "-n", "2"]) == shlex.split(options)


def test_groups_of_letters_lose_only_those_letters():
    assert kept_options(["-xvs", "-qx", "-vn2", "-xn", "3", "-xk", "a"]) == ["-vs", "-q", "-v", "-k", "a"]


INI = b"[pytest]\naddopts = -n 2 -q\npythonpath = src\n  lib\n"
TOML = b'[tool.pytest.ini_options]\naddopts = "-x -p my.plugin"\npythonpath = ["src"]\n'
SAID = {
    "pytest.ini": (INI, "-q", ("/w/src", "/w/lib")),
    "tox.ini": (INI, "-q", ("/w/src", "/w/lib")),
    "setup.cfg": (INI.replace(b"[pytest]", b"[tool:pytest]"), "-q", ("/w/src", "/w/lib")),
    "pyproject.toml": (TOML, "-p my.plugin", ("/w/src",)),
    "pytest.toml": (b'[pytest]\naddopts = ["-x", "-k", "a b"]\n', "-k 'a b'", ()),
}


@pytest.mark.parametrize(("name", "said"), SAID.items())
def test_settings_are_read_from_each_file_that_pytest_reads(name, said):
    content, options, pythonpath = said
    order = files_to_read("/w", ["/w/tests/test_a.py", "/w/tests/unit/test_b.py"])
    found = settings_of(order, {f"/w/{name}": content})
    assert (found.options[:2], found.pythonpath) == (("-o", f"addopts={options}"), pythonpath)


def test_the_nearest_file_that_says_something_of_pytest_is_it():
    order = files_to_read("/w", ["/w/tests/unit/test_a.py", "/w/tests/unit/test_b.py"])
    assert order[0].startswith("/w/tests/unit/") and order[-1] == "/w/setup.cfg"
    files = {"/w/tests/pyproject.toml": b"[project]\n", "/w/tests/pytest.ini": b"", "/w/pytest.ini": INI}
    assert "-o" not in settings_of(order, files).options  # an empty pytest.ini ends the search
    del files["/w/tests/pytest.ini"]
    assert settings_of(order, files).options[1] == "addopts=-q"


def test_a_file_that_cannot_be_read_is_left_to_pytest():
    assert "-o" not in settings_of(("/w/pyproject.toml",), {"/w/pyproject.toml": b"= no toml"}).options


def project(ini, **more):
    files = {**FILES, "pytest.ini": f"[pytest]\n{ini}\n", **more}
    return problem(files, fail_to_pass=FAIL_TO_PASS, pass_to_pass=("tests/test_names.py::SlugTest::test_slug",))


SPREAD = "-n 2 --forked --sw -x --cov=shop --cov-report term"


def test_a_project_whose_options_spread_cut_short_and_measure_is_graded():
    report = grade(problem().gold_patch, project(f"addopts = {SPREAD}"))
    assert report.is_resolved, report.detail


MARKED = (
    "import pytest\nimport extra\n\n\n@pytest.mark.shop\ndef test_marked():\n    assert extra.x == 1\n    assert __name__ == '{name}'\n"
)


@pytest.mark.parametrize(
    ("ini", "name"),
    [
        (f"addopts = {SPREAD} --strict-markers\n", "test_marked"),
        (f"addopts = {SPREAD} --strict-markers --import-mode=importlib\n", "tests.test_marked"),
    ],
)
def test_the_project_s_own_path_markers_filters_and_import_mode_work(ini, name):
    ini += "pythonpath = other\nmarkers =\n  shop: of the shop\nfilterwarnings =\n  error\npython_files = test_*.py\n"
    row = project(ini, **{"other/extra.py": "x = 1\n", "tests/test_marked.py": MARKED.format(name=name)})
    row = problem(row.files, pass_to_pass=("tests/test_marked.py::test_marked",))
    report = grade(row.gold_patch, row)
    assert report.is_resolved, report.detail
