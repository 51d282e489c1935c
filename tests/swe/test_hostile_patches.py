"""No patch that attacks its grading is graded as resolved, and each is refused for what it is."""

import pytest
from hostile_patches import HOSTILE
from hostile_reaches import HOSTILE_REACHES
from shop_project import grade, problem

ALL = {**HOSTILE, **HOSTILE_REACHES}
NEED_NO_SANDBOX = ("forbidden_path", "too_large", "invalid_patch")
ALWAYS = (
    "a conftest beside the tests rewrites reports",
    "a plugin by pyproject.toml",
    "sitecustomize",
    "a module named json",
    "a compiled test",
    "renamed tests",
    "each test is skipped",
    "sys.exit at import",
    "TestReport is patched",
    "another module is served for the tests",
    "a thread swaps tests after they are collected",
    "frames are walked to the tests",
    "forged lines to every open file",
    "the runner is killed",
    "a background process rewrites the tests",
    "an endless loop",
    "the code of the plugin's functions is read",
    "a hook comes and goes within a test",
    "a function of a test file is replaced",
    "frames by code of a file that is not there",
    "an equality that is a function of C",
)
"""One of each kind; `make test-slow` runs them all."""


def cases():
    for name, hostile in ALL.items():
        is_quick = name in ALWAYS or set(hostile.causes) <= set(NEED_NO_SANDBOX)
        yield pytest.param(hostile, id=name, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize("hostile", list(cases()))
def test_a_hostile_patch_is_refused_for_what_it_is(hostile):
    report = grade(hostile.patch, hostile.problem or problem(timeout_s=hostile.timeout_s))
    assert not report.is_resolved
    assert report.cause in hostile.causes, report.detail
    assert set(hostile.neutralised) <= set(report.neutralised)


def test_there_are_a_hundred_hostile_patches_and_one_of_each_kind_always_runs():
    assert len(ALL) >= 100
    assert set(ALWAYS) <= set(ALL)
