"""Every patch that mends its project is graded as resolved, however the project is laid out and tested."""

import pytest
from honest_patches import HONEST
from shop_project import grade

ALWAYS = (
    "the gold patch",
    "no final newline in the file",
    "files are renamed",
    "a picture is added",
    "src layout by pyproject",
    "pyproject gets a version and a dependency",
    "tests lie in the package",
    "a conftest that looks at reports and turns the order",
    "the mend is in a plugin of the project",
    "many fixtures, and builtins patched inside a test",
    "unittest's classes",
    "names with spaces, brackets and umlauts",
    "processes, forks, threads and loud output",
    "logging, tracebacks and named tuples in the mend",
    "modules of a package named as Python's",
    "the agent wrote the test that comes with a patch",
)
"""One of each kind; `make test-slow` runs them all."""


@pytest.mark.parametrize(
    "honest", [pytest.param(honest, id=name, marks=() if name in ALWAYS else pytest.mark.slow) for name, honest in HONEST.items()]
)
def test_an_honest_mend_is_resolved_and_loses_nothing_but_what_configures_tests(honest):
    report = grade(honest.patch, honest.problem)
    assert report.is_resolved, (report.cause, report.detail, report.failed_tests)
    assert report.neutralised == honest.neutralised


def test_there_are_forty_honest_patches_and_one_of_each_kind_always_runs():
    assert len(HONEST) >= 40
    assert set(ALWAYS) <= set(HONEST)
