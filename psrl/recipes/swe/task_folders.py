"""Problems from a folder of small projects, each with a bug, tests and a gold patch.

    FOLDER/<name>/project/        the project's files, text, its tests among them
    FOLDER/<name>/statement.md    the issue, as the agent reads it
    FOLDER/<name>/gold.patch      the mend, as `git diff` writes it (paths below project/)
    FOLDER/<name>/task.yaml       optional: test_paths, timeout_s, repo

Which tests the mend makes pass, and which it must not break, is found by running them.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from psrl.datasets.swe_fields import Refuse, checked_id, checked_paths, checked_statement, checked_text
from psrl.datasets.swe_rows import TASK_KIND, WORKDIR
from psrl.errors import ConfigError, RowError
from psrl.recipes.swe.validation import Grader
from psrl.swe.diffs import DiffError, touched_paths
from psrl.swe.patch import PatchRefusedError
from psrl.swe.verdict import RunEnd, TestReport, TestStatus
from psrl.types import SweProblem

MAX_PROJECT_BYTES = 2 * 2**20
NOT_PROJECT = ("__pycache__", ".git", ".pytest_cache")
TASK_KEYS = ("test_paths", "timeout_s", "repo")
DEFAULT_TEST_FOLDERS = ("tests", "test")


def task_folders(root: Path) -> list[Path]:
    """The folders of the tasks, by name.

    Raises:
        ConfigError: There is none.
    """
    if not root.is_dir():
        raise ConfigError(key="--tasks", value=str(root), rule="is no folder", fix="name a folder that holds one folder per task")
    found = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not found:
        fix = "make FOLDER/<name>/ with project/, statement.md and gold.patch"
        raise ConfigError(key="--tasks", value=str(root), rule="holds no folder of a task", fix=fix)
    return found


def read_task_folder(folder: Path) -> SweProblem:
    """A task as it lies there; its lists of tests are still empty.

    Raises:
        RowError: Reasons: `bad_field` (the folder's name, which is the id), `no_project`, `bad_file`, `empty_statement`, `too_large`,
            `no_gold_patch`, `bad_patch`, `bad_task_yaml`, `no_test_files`.
    """

    def refuse(reason: str, detail: str) -> RowError:
        return RowError(source=folder.name, row=-1, reason=reason, detail=detail)

    checked_id(folder.name, refuse, what="the folder's name")
    project = folder / "project"
    if not project.is_dir():
        raise refuse("no_project", "there is no folder project/")
    files = _files_of(project, refuse)
    said = _text_of(folder / "statement.md", "statement.md", refuse, missing="empty_statement")
    statement = checked_statement(said, refuse, what="statement.md")
    gold_patch = _text_of(folder / "gold.patch", "gold.patch", refuse, missing="no_gold_patch")
    try:
        checked_paths(touched_paths(gold_patch), "bad_patch", refuse)
    except DiffError as error:
        raise refuse("bad_patch", f"gold.patch: {error}") from error
    settings = _settings_of(folder / "task.yaml", refuse)
    test_paths = settings.get("test_paths") or _found_tests(files)
    missing = [path for path in test_paths if not any(file == path or file.startswith(f"{path.rstrip('/')}/") for file in files)]
    if missing or not test_paths:
        raise refuse("no_test_files", f"there are no tests at {', '.join(missing) or 'tests/ or test_*.py'}; task.yaml may name test_paths")
    return SweProblem(
        instance_id=folder.name,
        repo=settings.get("repo") or folder.name,
        task_kind=TASK_KIND,
        statement=statement,
        workdir=WORKDIR,
        files=files,
        gold_patch=gold_patch,
        test_paths=tuple(test_paths),
        fail_to_pass=(),
        timeout_s=settings.get("timeout_s") or 60.0,
    )


async def with_tests_found(problem: SweProblem, grader: Grader, *, k: int) -> SweProblem:
    """The problem with its lists of tests, found by running them `k` times before and after the gold patch.

    Raises:
        RowError: Reasons: `bad_patch`, `tests_do_not_run`, `flaky_tests`, `no_fail_to_pass`.
        SandboxError, EnvironmentFault: They could not be run.
    """

    def refuse(reason: str, detail: str) -> RowError:
        return RowError(source=problem.instance_id, row=-1, reason=reason, detail=detail[:2000])

    before = [await grader.run_tests(problem, "") for _ in range(k)]
    try:
        after = [await grader.run_tests(problem, problem.gold_patch) for _ in range(k)]
    except PatchRefusedError as error:
        raise refuse("bad_patch", f"gold.patch: {error.cause}: {error.detail}") from error
    for report in after:
        if report.end is not RunEnd.COMPLETE:
            raise refuse("tests_do_not_run", f"with the gold patch: {report.end}: {report.detail}")
    flaky = sorted(name for reports in (before, after) for name in _unsteady(reports))
    if flaky:
        raise refuse("flaky_tests", f"did not always end alike: {', '.join(flaky[:5])}")
    passing_before, passing_after = _passed(before[0]), _passed(after[0])
    fail_to_pass = [name for name in after[0].statuses if name in passing_after and name not in passing_before]
    if not fail_to_pass:
        broken = next((name for name, status in after[0].statuses.items() if status is TestStatus.ERROR and "::" not in name), None)
        if broken is not None:
            why = _syntax_error(problem.files.get(broken, "")) or after[0].failures.get(broken) or "no reason said"
            raise refuse("tests_do_not_run", f"with the gold patch, {broken} cannot be read: {why}")
        said = f"{len(passing_before)} pass before the gold patch, {len(passing_after)} after it"
        why = f"; {before[0].detail}" if before[0].detail else ""
        raise refuse("no_fail_to_pass", f"the gold patch makes no failing test pass ({said}{why})")
    pass_to_pass = [name for name in after[0].statuses if name in passing_after and name in passing_before]
    return replace(problem, fail_to_pass=tuple(fail_to_pass), pass_to_pass=tuple(pass_to_pass))


def _syntax_error(text: str) -> str | None:
    """What Python finds in a file that it cannot read; None where it can, so that the fault lies in what the file imports."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        return f"SyntaxError: {error.msg} (line {error.lineno})"
    except (ValueError, RecursionError, MemoryError):
        return None
    return None


def _passed(report: TestReport) -> set[str]:
    return {name for name, status in report.statuses.items() if status is TestStatus.PASSED}


def _unsteady(reports: Sequence[TestReport]) -> set[str]:
    """Tests that passed in some of the runs only."""
    passed = [_passed(report) for report in reports]
    return set.union(*passed) - set.intersection(*passed)


def _files_of(project: Path, refuse: Refuse) -> dict[str, str]:
    files: dict[str, str] = {}
    size_bytes = 0
    for path in sorted(project.rglob("*")):
        relative = path.relative_to(project)
        if any(part in NOT_PROJECT for part in relative.parts) or path.suffix == ".pyc":
            continue
        if path.is_symlink():
            raise refuse("bad_file", f"project/{relative} is a link")
        if not path.is_file():
            continue
        size_bytes += path.stat().st_size
        if size_bytes > MAX_PROJECT_BYTES:
            raise refuse("bad_file", f"project/ has more than {MAX_PROJECT_BYTES // 2**20} MiB; give larger ones as an image")
        name = checked_text(str(relative), "the name of a file of project/", refuse)
        files[name] = _text_of(path, f"project/{name}", refuse, missing="bad_file")
    if not files:
        raise refuse("no_project", "project/ is empty")
    return files


def _text_of(path: Path, name: str, refuse: Refuse, *, missing: str) -> str:
    """The file's text; `name` is what errors call it."""
    if not path.is_file():
        raise refuse(missing, f"there is no file {name}")
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise refuse("bad_file", f"{name} is no UTF-8 text (byte {error.start})") from error


def _found_tests(files: Mapping[str, str]) -> list[str]:
    folders = [folder for folder in DEFAULT_TEST_FOLDERS if any(path.startswith(f"{folder}/") for path in files)]
    return folders or [path for path in files if Path(path).name.startswith("test_") and path.endswith(".py")]


def _settings_of(path: Path, refuse: Refuse) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = yaml.safe_load(_text_of(path, "task.yaml", refuse, missing="bad_task_yaml")) or {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise refuse("bad_task_yaml", f"cannot be read: {' '.join(str(error).split()):.200}") from error
    if not isinstance(settings, dict):
        raise refuse("bad_task_yaml", "must be a mapping")
    unknown = [key for key in settings if key not in TASK_KEYS]
    if unknown:
        raise refuse("bad_task_yaml", f"{unknown[0]!r} is not known; known are {', '.join(TASK_KEYS)}")
    paths, timeout_s, repo = (settings.get(key) for key in TASK_KEYS)
    if paths is not None and not (isinstance(paths, list) and paths and all(isinstance(each, str) for each in paths)):
        raise refuse("bad_task_yaml", f"test_paths must be a list of paths below project/, it is {paths!r:.80}")
    checked_paths(paths or (), "bad_task_yaml", refuse)
    if timeout_s is not None and not (isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool) and 0 < timeout_s <= 86400):
        raise refuse("bad_task_yaml", f"timeout_s must be a number of seconds, it is {timeout_s!r:.80}")
    if repo is not None and not (isinstance(repo, str) and repo):
        raise refuse("bad_task_yaml", f"repo must be a name, it is {repo!r:.80}")
    checked_text(repo or "", "repo", refuse)
    return settings
