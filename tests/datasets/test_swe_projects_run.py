"""pytest, in a real sandbox, says of generated projects what their problems say: which tests fail before the mend, and none after."""

import asyncio

import pytest

from psrl.config.reward import ExecutionConfig
from psrl.config.sandbox import SandboxConfig
from psrl.datasets.generators import build_generator
from psrl.datasets.generators.swe_projects.shapes import BugKind
from psrl.rewards.execution import ProjectGrader
from psrl.sandbox import BackendSandboxes
from psrl.swe.verdict import TestStatus
from psrl.types import SweProblem


async def statuses_of(tasks):
    """(statuses without a patch, statuses with the gold patch) of each task's tests."""
    grader = ProjectGrader(BackendSandboxes(SandboxConfig(packages=["pytest"])), ExecutionConfig(), num_concurrent=2)
    try:
        problems = [SweProblem.of_task(task) for task in tasks]
        runs = [grader.run_tests(problem, patch) for problem in problems for patch in ("", problem.gold_patch)]
        reports = await asyncio.gather(*runs)
        return [(before.statuses, after.statuses) for before, after in zip(reports[::2], reports[1::2], strict=True)]
    finally:
        await grader.close()


def check(tasks):
    for task, (before, after) in zip(tasks, asyncio.run(statuses_of(tasks)), strict=True):
        problem = SweProblem.of_task(task)
        named = {*problem.fail_to_pass, *problem.pass_to_pass}
        assert set(before) == set(after) == named, problem.files
        assert {name for name in named if before[name] is TestStatus.FAILED} == set(problem.fail_to_pass)
        assert {name for name in named if before[name] is TestStatus.PASSED} == set(problem.pass_to_pass)
        assert set(after.values()) == {TestStatus.PASSED}


def test_one_project_of_each_kind_fails_and_passes_as_it_says():
    check(build_generator("swe_projects").val_tasks(len(BugKind), seed=1))


@pytest.mark.slow
def test_all_200_projects_fail_and_pass_as_they_say():
    generator = build_generator("swe_projects")
    check([*generator.train_tasks(160, seed=1), *generator.val_tasks(40, seed=1)])
