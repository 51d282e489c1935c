"""A problem is good where its gold patch resolves it and nothing does not, every time, for real."""

import asyncio
import json
from dataclasses import replace

import pytest
from recipes.swe_published_rows import smith_row
from recipes.swe_task_folders import diff_of, write_task

from psrl.cli.main import main
from psrl.config.reward import ExecutionConfig
from psrl.config.sandbox import SandboxConfig
from psrl.errors import RowError, SandboxError, SandboxUnavailableError
from psrl.recipes.swe.task_folders import read_task_folder, with_tests_found
from psrl.recipes.swe.validation import Validator
from psrl.rewards.execution import ProjectGrader
from psrl.sandbox import BackendSandboxes
from psrl.swe.verdict import TestReport, TestStatus, judge
from psrl.types import SweProblem

MENDED, OTHER = "tests/test_sums.py::test_sum", "tests/test_sums.py::test_nothing"


@pytest.fixture
def problem(tmp_path):
    read = read_task_folder(write_task(tmp_path / "tasks", "one"))
    return replace(read, fail_to_pass=(MENDED,), pass_to_pass=(OTHER,))


class ScriptedGrader:
    """Says what a list says, in turn; for runs that differ, which real ones do by chance only."""

    def __init__(self, *, gold: list[bool | Exception], null: list[bool]) -> None:
        self.gold, self.null = list(gold), list(null)

    async def grade(self, problem, patch):
        is_resolved = self.gold.pop(0)
        if isinstance(is_resolved, Exception):
            raise is_resolved
        return judge(problem, report_of(problem, is_resolved))

    async def run_tests(self, problem, patch):
        return report_of(problem, (self.gold if patch else self.null).pop(0))


def report_of(problem, is_resolved):
    status = TestStatus.PASSED if is_resolved else TestStatus.FAILED
    return TestReport(statuses={MENDED: status, OTHER: TestStatus.PASSED})


def validated(problems, grader, folder, *, k=2):
    validator = Validator(grader, k=k, num_at_once=2, cache=folder / "validation.jsonl")
    good, left_out = asyncio.run(validator.run(problems))
    return [problem.instance_id for problem in good], [error.reason for error in left_out]


@pytest.mark.slow  # test_swe_docker_rows does the same with images
def test_real_runs_tell_good_problems_from_those_whose_tests_say_nothing(tmp_path, problem):
    useless = replace(problem, instance_id="useless", gold_patch=problem.gold_patch.replace("a + b", "b - a"))
    no_bug = replace(problem, instance_id="no_bug", fail_to_pass=(OTHER,), pass_to_pass=())

    async def run():
        settings = ExecutionConfig(cache_size=0)
        grader = ProjectGrader(BackendSandboxes(SandboxConfig(packages=["pytest"])), settings, num_concurrent=2)
        validator = Validator(grader, k=1, num_at_once=2, cache=tmp_path / "validation.jsonl")
        good, left_out = await validator.run([problem, useless, no_bug])
        await grader.close()
        return good, {error.source: (error.reason, error.detail) for error in left_out}

    good, left_out = asyncio.run(run())
    assert good == [problem]
    assert left_out["useless"][0] == "gold_not_resolved" and "tests_failed" in left_out["useless"][1] and MENDED in left_out["useless"][1]
    assert left_out["no_bug"] == ("null_resolved", "passed 1 of 1 times with nothing changed")


@pytest.mark.parametrize(
    ("gold", "null", "reason"),
    [
        ([True, True], [False, False], None),
        ([True, False], [], "gold_flaky"),
        ([False, False], [], "gold_not_resolved"),
        ([True, True], [False, True], "null_flaky"),
        ([True, True], [True, True], "null_resolved"),
        ([SandboxError("the place is lost")], [], "cannot_be_run"),
        ([SandboxUnavailableError("no Python in the image")], [], "cannot_be_run"),
    ],
)
def test_each_way_to_be_no_good_has_its_reason(tmp_path, problem, gold, null, reason):
    good, left_out = validated([problem], ScriptedGrader(gold=gold, null=null), tmp_path)
    assert (good, left_out) == ((["one"], []) if reason is None else ([], [reason]))


def test_a_validation_goes_on_where_it_was_interrupted(tmp_path, problem):
    other = replace(problem, instance_id="two")
    validated([problem], ScriptedGrader(gold=[True, True], null=[False, False]), tmp_path)
    cache = tmp_path / "validation.jsonl"
    cache.write_text(cache.read_text() + '{"key": "cut in the mid')
    # Nothing is left to say of the first problem: it would raise IndexError if it were run again.
    good, left_out = validated([problem, other], ScriptedGrader(gold=[False, False], null=[]), tmp_path)
    assert (good, left_out) == (["one"], ["gold_not_resolved"])


def test_a_changed_problem_and_one_that_could_not_be_run_are_run_again(tmp_path, problem):
    validated([problem], ScriptedGrader(gold=[SandboxError("lost")], null=[]), tmp_path)
    assert validated([problem], ScriptedGrader(gold=[True, True], null=[False, False]), tmp_path) == (["one"], [])
    changed = replace(problem, timeout_s=1.0)
    assert validated([changed], ScriptedGrader(gold=[False, False], null=[]), tmp_path) == ([], ["gold_not_resolved"])


def test_a_machine_that_can_run_nothing_says_so_before_anything_is_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    (tmp_path / "rows.jsonl").write_text(json.dumps(smith_row()) + "\n")
    words = ["--source", str(tmp_path / "rows.jsonl"), "--output", str(tmp_path / "out"), "--allow-tags", "--validate", "--no-with-model"]
    with pytest.raises(SystemExit) as info:
        main(["prepare", "swe", *words])
    assert info.value.code == 1
    assert "no Docker Engine answers" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_tests_that_end_now_so_now_otherwise_are_named(tmp_path, problem):
    bare = replace(problem, fail_to_pass=(), pass_to_pass=())
    with pytest.raises(Exception, match=r"flaky_tests: .*test_sum"):
        asyncio.run(with_tests_found(bare, ScriptedGrader(gold=[True, False], null=[False, False]), k=2))
    found = asyncio.run(with_tests_found(bare, ScriptedGrader(gold=[True, True], null=[False, False]), k=2))
    assert (found.fail_to_pass, found.pass_to_pass) == ((MENDED,), (OTHER,))


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (lambda folder: (folder / "project/data.bin").write_bytes(b"\xff\xfe"), "bad_file"),
        (lambda folder: (folder / "project/link.py").symlink_to("/etc/passwd"), "bad_file"),
        (lambda folder: (folder / "project/big.txt").write_text("x" * (2 * 2**20 + 1)), "bad_file"),
        (lambda folder: (folder / "project").rename(folder / "elsewhere"), "no_project"),
        (lambda folder: (folder / "gold.patch").unlink(), "no_gold_patch"),
        (lambda folder: (folder / "statement.md").unlink(), "empty_statement"),
        (lambda folder: (folder / "task.yaml").write_text("{broken"), "bad_task_yaml"),
        (lambda folder: (folder / "project/pkg/data.bin").write_bytes(b"a\xff"), r"bad_file: project/pkg/data\.bin"),
        (lambda folder: (folder / "statement.md").write_text("x" * 200_001), "too_large"),
        (lambda folder: (folder / "gold.patch").write_text(diff_of("a\n", "b\n").replace("pkg/sums.py", "../../e")), "bad_patch"),
        (lambda folder: (folder / "task.yaml").write_text("[" * 100_000), "bad_task_yaml"),
        (lambda folder: (folder / "task.yaml").write_text("test_paths: [/etc]"), "bad_task_yaml"),
        (lambda folder: (folder / "task.yaml").write_text("test_paths: [tests, a/../../x]"), "bad_task_yaml"),
        (lambda folder: (folder / "task.yaml").write_text("test_paths: [.git]"), "bad_task_yaml"),
        (lambda folder: (folder / "task.yaml").write_text("timeout_s: soon"), "bad_task_yaml"),
        (lambda folder: (folder / "task.yaml").write_text("test_paths: [spec]"), "no_test_files"),
    ],
)
def test_a_folder_that_is_no_task_says_why(tmp_path, break_it, reason):
    folder = write_task(tmp_path, "one", task_yaml="{test_paths: [tests], timeout_s: 5, repo: mine}")
    read = read_task_folder(folder)
    assert (read.repo, read.timeout_s, read.test_paths) == ("mine", 5, ("tests",))
    named = replace(read, fail_to_pass=(MENDED,))
    assert SweProblem.of_row(json.loads(json.dumps(named.to_row())), source="s", uid="u") == named
    break_it(folder)
    with pytest.raises(Exception, match=f"one row -1: {reason}"):
        read_task_folder(folder)


@pytest.mark.parametrize("name", ["two words", "größe", "-x", "x" * 201])
def test_a_folder_whose_name_is_no_id_is_refused(tmp_path, name):
    with pytest.raises(RowError, match="bad_field: the folder's name is no plain name"):
        read_task_folder(write_task(tmp_path, name))
