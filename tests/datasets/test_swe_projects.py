"""The generated projects have one bug each, which their gold patch mends, and are split for good; what scripted episodes show is real."""

import ast
import asyncio
import random
import subprocess
from collections import Counter
from itertools import pairwise

import pytest

from psrl.config.sandbox import SandboxConfig
from psrl.datasets.generators import build_generator
from psrl.datasets.generators.swe_projects.episodes import DILIGENT, SUBMIT, demonstrate, edit_command
from psrl.datasets.generators.swe_projects.project import draw_case, draw_function, problem_of
from psrl.datasets.generators.swe_projects.shapes import SHAPES, BugKind
from psrl.sandbox import BackendSandboxes
from psrl.sandbox.build import limits_of
from psrl.swe.project import prepare_project, sandbox_spec, take_patch
from psrl.types import Role, SweProblem

SETTINGS = SandboxConfig()


@pytest.fixture(scope="module")
def tasks():
    """The 200 projects of seed 1: (training, validation)."""
    generator = build_generator("swe_projects")
    return generator.train_tasks(160, seed=1), generator.val_tasks(40, seed=1)


@pytest.fixture(scope="module")
def problems(tasks):
    return [SweProblem.of_task(task) for part in tasks for task in part]


def rng_of(seed):
    return random.Random(seed)


def functions_of(text):
    return {node.name: ast.unparse(node) for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def apply(problem, folder):
    """The project's files after its gold patch, as git applies it."""
    for path, text in problem.files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    subprocess.run(["git", "apply", "-"], input=problem.gold_patch.encode(), cwd=folder, check=True)
    return {path: (folder / path).read_text() for path in problem.files}


def test_the_200_projects_are_all_different_and_their_files_parse(problems):
    assert len({problem.instance_id for problem in problems}) == 200
    for problem in problems:
        modules = [path for path in problem.files if path.startswith(f"{problem.repo}/") and "__init__" not in path]
        assert 2 <= len(modules) <= 4
        assert {"README.md", "pyproject.toml", f"{problem.repo}/__init__.py"} <= set(problem.files)
        for path in problem.files:
            if path.endswith(".py"):
                ast.parse(problem.files[path])


def test_the_tests_named_by_a_problem_are_those_of_its_files(problems):
    for problem in problems:
        named = problem.fail_to_pass + problem.pass_to_pass
        written = [
            f"{path}::{name}" for path in problem.files if path.startswith("tests/test_") for name in functions_of(problem.files[path])
        ]
        assert sorted(named) == sorted(written)
        assert 6 <= len(named) <= 12
        assert problem.fail_to_pass


def test_git_applies_each_gold_patch_and_it_changes_one_line_of_one_function(problems, tmp_path):
    for index, problem in enumerate(problems):
        after = apply(problem, tmp_path / str(index))
        (changed,) = (path for path in after if after[path] != problem.files[path])
        assert changed in problem.statement
        before, mended = (text.splitlines() for text in (problem.files[changed], after[changed]))
        assert sum(old != new for old, new in zip(before, mended, strict=True)) == 1
        functions, mends = functions_of(problem.files[changed]), functions_of(after[changed])
        (name,) = (each for each in functions if functions[each] != mends[each])
        assert name in problem.statement


def test_the_ten_kinds_come_equally_often_in_both_splits(tasks):
    train, val = (Counter(task.data_source for task in part) for part in tasks)
    assert train == {f"swe_projects/{kind}": 16 for kind in BugKind}
    assert val == {f"swe_projects/{kind}": 4 for kind in BugKind}
    assert len(BugKind) == 10


def buggy_functions(tasks):
    """The functions that gold patches change, with their bugs."""
    found = set()
    for task in tasks:
        problem = SweProblem.of_task(task)
        (path,) = (line[6:] for line in problem.gold_patch.splitlines() if line.startswith("--- a/"))
        (taken,) = (line[1:] for line in problem.gold_patch.splitlines() if line.startswith("-") and line[:3] != "---")
        (function,) = (part.strip() for part in problem.files[path].split("\n\n\n") if taken in part.splitlines())
        found.add(function)
    return found


def test_no_validation_function_is_trained_on_or_shown_whatever_the_seeds():
    generator = build_generator("swe_projects")
    train = buggy_functions([task for seed in range(4) for task in generator.train_tasks(160, seed=seed)])
    val = buggy_functions([task for seed in range(4) for task in generator.val_tasks(40, seed=seed)])
    assert len(val) > 150
    assert len(train) > 600
    assert not val & train
    cases = [draw_case(rng_of(index), kind, is_val=False) for index in range(40) for kind in BugKind]
    assert not any(case.is_val for case in cases)


def test_the_same_seed_gives_the_same_tasks_and_another_seed_others(tasks):
    generator = build_generator("swe_projects")
    assert generator.train_tasks(160, seed=1) == tasks[0]
    assert not {task.uid for task in generator.train_tasks(160, seed=2)} & {task.uid for task in tasks[0]}


def test_the_mend_cannot_be_known_without_reading():
    """Every mend holds a name that the issue does not, and that differs between functions of the same shape."""
    for shape in SHAPES:
        edits = {draw_function(rng_of(seed), shape).edit for seed in range(60)}
        assert len(edits) >= 8, shape.doc
    for seed in range(20):
        for kind in BugKind:
            case = draw_case(rng_of(seed), kind, is_val=False)
            assert case.bug.edit[0] not in case.statement


def test_scripted_episodes_alternate_and_end_with_a_submission():
    for each in build_generator("swe_projects").demonstrations(2000, seed=1):
        assert [message.role for message in each.messages[:2]] == [Role.SYSTEM, Role.USER]
        assert all((before.role is Role.ASSISTANT) != (after.role is Role.ASSISTANT) for before, after in pairwise(each.messages[1:]))
        assert each.messages[-1].content == SUBMIT


def test_the_last_scripted_episodes_are_lazy():
    shown = build_generator("swe_projects").demonstrations(2000, seed=1)
    num_reading = [sum("grep" in each.messages[2].content for each in part) / len(part) for part in (shown[:1500], shown[-200:])]
    assert num_reading[0] > 0.95
    assert num_reading[1] < 0.5


@pytest.mark.parametrize("kind", BugKind)
def test_the_shell_answers_a_diligent_episode_as_shown_and_the_project_is_mended(kind):
    rng = rng_of(f"replay-{kind}")
    for _ in range(3):
        case = draw_case(rng, kind, is_val=False)
        shown = demonstrate(case, DILIGENT, rng)
        while edit_command(case.path, case.bug) not in [message.content for message in shown.messages]:
            shown = demonstrate(case, DILIGENT, rng)
        problem = problem_of(case, rng)
        answers, patch = asyncio.run(replayed(problem, [message.content for message in shown.messages if message.role is Role.ASSISTANT]))
        assert answers[:-1] == [message.content for message in shown.messages[3:] if message.role is Role.USER]
        assert answers[-1] == "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
        assert changes_of(patch) == changes_of(problem.gold_patch)


def changes_of(patch):
    """The lines that a diff takes and gives, with their file."""
    return [line for line in patch.splitlines() if line[:1] in "+-"]


async def replayed(problem, turns):
    """What a real shell answers to the commands, as `agent.yaml` shows it, and the patch that they leave."""
    sandbox = BackendSandboxes(SETTINGS).make(sandbox_spec(problem, limits_of(SETTINGS)))
    await sandbox.start()
    try:
        base = await prepare_project(sandbox, problem)
        answers = []
        for turn in turns:
            ended = await sandbox.run(["bash", "-c", turn.removeprefix("$ ")])
            answers.append((ended.stdout + ended.stderr).decode().rstrip() or f"exit {ended.exit_code}")
        return answers, await take_patch(sandbox, base, limits_of(SETTINGS))
    finally:
        await sandbox.stop()
