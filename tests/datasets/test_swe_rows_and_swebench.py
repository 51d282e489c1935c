"""The rows of the tests are those that the released swebench package reads, and what is made of them goes through its own types."""

import importlib.util
import json
from pathlib import Path

from recipes.swe_published_rows import bench_row, bench_row_5
from swebench import types as swebench_types

from psrl.datasets.swe_commands import END_MARKER, NO_TESTS, START_MARKER
from psrl.datasets.swe_rows import problem_of_raw_row

HARNESS = Path(importlib.util.find_spec("swebench").origin).parent / "harness"


def in_harness(file, start, end):
    """Part of a module of the harness, whose package imports Docker, Modal and more."""
    text = (HARNESS / file).read_text()
    first = text.index(start)
    return text[first : text.index(end, first)]


def test_a_row_has_every_column_that_swebench_s_own_type_names():
    assert set(swebench_types.SWEbenchInstance.__annotations__) <= set(bench_row())


def test_swebench_makes_its_specification_of_the_row_and_names_the_same_tests_and_image():
    space = {"json": json, "TestSpec": swebench_types.TestSpec}
    exec(in_harness("constants/__init__.py", "START_TEST_OUTPUT =", "# Constants - Evaluation Misc"), space)
    exec(in_harness("utils.py", "def parse_eval_script", "def make_test_spec"), space)
    exec("def make_test_spec" + (HARNESS / "utils.py").read_text().split("def make_test_spec")[1], space)
    spec = space["make_test_spec"](bench_row_5())
    problem = problem_of_raw_row(bench_row_5(), source="s", row=0)
    assert (problem.instance_id, problem.repo, problem.image, problem.log_parser) == (
        spec.instance_id, spec.repo, spec.image, spec.log_parser
    )  # fmt: skip
    assert list(problem.fail_to_pass) == spec.FAIL_TO_PASS
    assert set(problem.pass_to_pass) == set(spec.PASS_TO_PASS)
    assert (space["START_TEST_OUTPUT"], space["END_TEST_OUTPUT"]) == (START_MARKER, END_MARKER)


def test_files_that_are_no_tests_are_those_of_swebench():
    space = {}
    exec(in_harness("constants/__init__.py", "NON_TEST_EXTS =", "SWE_BENCH_URL_RAW"), space)
    assert list(NO_TESTS) == space["NON_TEST_EXTS"]
