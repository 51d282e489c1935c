"""Rows of SWE-bench, SWE-Gym and SWE-smith, each to a `SweProblem`; a row that cannot be used is an error with a reason.

| | SWE-bench | SWE-Gym | SWE-smith |
|---|---|---|---|
| told by | anything else | its eleven repositories | a column `image_name` and no `test_patch` |
| `patch` | mends the bug | mends the bug | makes the bug: the gold patch is its reverse, and the set-up applies it |
| image | `image`, `image_name`, `docker_image`, or by the id | the same | `image_name` |
| test command | `eval_script`, else by repository and version | pytest on the files of the tests | pytest on the files of the tests |
| log parser | `log_parser`, else by repository | `parse_log_pytest` | `parse_log_pytest` |

None of them is graded by psrl's own runner of pytest: their lists name tests as a log parser read them, cut at the first space, and their
Python is that of a conda environment which the command must enter first.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from psrl.datasets.swe_commands import ACTIVATE, PYTEST, command_of_repo, command_of_script, repo_tests, shell_command
from psrl.datasets.swe_fields import (
    Refuse,
    checked_id,
    checked_parser,
    checked_paths,
    checked_statement,
    shown,
    tests_named,
    text_of,
)
from psrl.errors import RowError
from psrl.swe.diffs import DiffError, reversed_diff, touched_paths
from psrl.types import SweProblem

TASK_KIND = "swe"
WORKDIR = "/testbed"
BENCH_TIMEOUT_S = 1800.0
"""What SWE-bench's own harness allows."""
SMITH_TIMEOUT_S = 900.0
MAX_COMMAND_BYTES = 100_000
"""Linux passes at most 128 KiB in one argument of a program."""
GYM_REPOS = frozenset(
    {
        "bokeh/bokeh",
        "conan-io/conan",
        "dask/dask",
        "facebookresearch/hydra",
        "getmoto/moto",
        "iterative/dvc",
        "modin-project/modin",
        "pandas-dev/pandas",
        "Project-MONAI/MONAI",
        "pydantic/pydantic",
        "python/mypy",
    }
)
PYTEST_PARSER = "parse_log_pytest"
IMAGE_COLUMNS = ("image", "image_name", "docker_image")
_IMAGE = re.compile(r"[a-z0-9][a-z0-9._:/-]*(@sha256:[0-9a-f]{64})?")


class SweFormat(StrEnum):
    """Whose columns a row has."""

    SWE_BENCH = "swe_bench"
    """SWE-bench, Lite, Verified and Multilingual, of before and since version 5 of the `swebench` package."""
    SWE_GYM = "swe_gym"
    SWE_SMITH = "swe_smith"


def format_of(raw: Mapping[str, Any]) -> SweFormat:
    """Whose columns these are."""
    if "image_name" in raw and not raw.get("test_patch"):
        return SweFormat.SWE_SMITH
    return SweFormat.SWE_GYM if raw.get("repo") in GYM_REPOS else SweFormat.SWE_BENCH


def problem_of_raw_row(raw: Any, *, source: str, row: int, swe_format: SweFormat | None = None, allow_network: bool = False) -> SweProblem:
    """One published row as a problem; its image is named as the row or the format names it, not yet pinned.

    Args:
        raw: The row, or the error that reading it raised.
        source: For errors.
        row: For errors.
        swe_format: Whose columns it has; None: told by them.
        allow_network: Of the sandboxes.

    Raises:
        RowError: Reasons: `not_json`, `not_an_object`, `bad_field`, `empty_statement`, `missing_image`, `no_fail_to_pass`, `bad_patch`,
            `bad_test_patch`, `no_test_command`, `fail_only_tests`, `binary_assets`, `not_pytest`, `too_large`.
    """

    def refuse(reason: str, detail: str) -> RowError:
        return RowError(source=source, row=row, reason=reason, detail=detail)

    if isinstance(raw, ValueError):
        raise refuse("not_json", str(raw))
    if not isinstance(raw, Mapping):
        raise refuse("not_an_object", f"a row is an object, this is {type(raw).__name__}")
    instance_id = checked_id(text_of(raw, "instance_id", refuse), refuse)

    def refuse_named(reason: str, detail: str) -> RowError:
        return refuse(reason, f"{instance_id}: {detail}")

    read = {SweFormat.SWE_BENCH: _bench, SweFormat.SWE_GYM: _gym, SweFormat.SWE_SMITH: _smith}[swe_format or format_of(raw)]
    fail_to_pass = tests_named(raw, "FAIL_TO_PASS", refuse_named)
    if not fail_to_pass:
        raise refuse_named("no_fail_to_pass", "no test says that the bug is mended")
    statement = checked_statement(text_of(raw, "problem_statement", refuse_named, default=""), refuse_named)
    common = {
        "instance_id": instance_id,
        "repo": text_of(raw, "repo", refuse_named),
        "task_kind": TASK_KIND,
        "statement": statement,
        "workdir": WORKDIR,
        "fail_to_pass": fail_to_pass,
        "pass_to_pass": tests_named(raw, "PASS_TO_PASS", refuse_named),
        "allow_network": allow_network,
    }
    return SweProblem(**common, **read(raw, common, refuse_named))


def _bench(raw: Mapping[str, Any], common: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    if raw.get("eval_type") == "fail_only":
        raise refuse("fail_only_tests", "its log names failed tests only, so that nothing says that a test passed")
    if raw.get("image_assets") not in (None, "", "{}", {}, "null"):
        raise refuse("binary_assets", "its tests compare pictures, which lie beside the row and not in its patch")
    test_patch = text_of(raw, "test_patch", refuse, default="")
    test_paths = _touched(test_patch, "bad_test_patch", refuse)
    script = text_of(raw, "eval_script", refuse, default="")
    tests = repo_tests(common["repo"], str(raw.get("version") or ""))
    command = command_of_script(script) if script else None
    if command is None and tests is not None:
        command = command_of_repo(tests, common["repo"], test_paths)
    parser = checked_parser(text_of(raw, "log_parser", refuse, default=""), refuse) or (tests.parser if tests else "")
    if command is None or not parser:
        known = f"{common['repo']} {raw.get('version')}"
        raise refuse("no_test_command", f"the row has no eval_script and log_parser, and nothing is known of {known}")
    return {
        "image": _image(raw, refuse)
        or f"docker.io/swebench/sweb.eval.x86_64.{common['instance_id'].replace('__', '_1776_')}:latest".lower(),
        "gold_patch": _gold(raw, refuse),
        "test_patch": test_patch,
        "test_paths": test_paths,
        "test_command": _bounded(command, refuse),
        "log_parser": parser,
        "timeout_s": BENCH_TIMEOUT_S,
    }


def _gym(raw: Mapping[str, Any], common: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    test_patch = text_of(raw, "test_patch", refuse, default="")
    return {
        "image": _image(raw, refuse) or f"docker.io/xingyaoww/sweb.eval.x86_64.{common['instance_id'].replace('__', '_s_')}:latest".lower(),
        "gold_patch": _gold(raw, refuse),
        "test_patch": test_patch,
        "test_paths": _touched(test_patch, "bad_test_patch", refuse),
        "test_command": _pytest_command(_files_of_tests(common, refuse), refuse),
        "log_parser": PYTEST_PARSER,
        "timeout_s": BENCH_TIMEOUT_S,
    }


def _smith(raw: Mapping[str, Any], common: Mapping[str, Any], refuse: Refuse) -> dict[str, Any]:
    image = _image(raw, refuse)
    if image is None:
        raise refuse("missing_image", "image_name is empty")
    bug = text_of(raw, "patch", refuse, default="")
    _touched(bug, "bad_patch", refuse)
    try:
        gold_patch = reversed_diff(bug)
    except DiffError as error:
        raise refuse("bad_patch", str(error)) from error
    test_files = _files_of_tests(common, refuse)
    return {
        "image": image,
        "gold_patch": gold_patch,
        "test_paths": test_files,
        "hidden_paths": tuple(dict.fromkeys(name.partition("::")[0] for name in common["fail_to_pass"])),
        "test_command": _pytest_command(test_files, refuse),
        "log_parser": PYTEST_PARSER,
        "setup_commands": (_bounded(_apply_command(bug), refuse),),
        "timeout_s": SMITH_TIMEOUT_S,
    }


def _files_of_tests(common: Mapping[str, Any], refuse: Refuse) -> tuple[str, ...]:
    """`tests/test_a.py` of `tests/test_a.py::test_b`."""
    names = [*common["fail_to_pass"], *common["pass_to_pass"]]
    others = [name for name in common["fail_to_pass"] if not name.partition("::")[0].endswith(".py")]
    if others:
        raise refuse("not_pytest", f"is no test of a Python file: {shown(others[0])}")
    files = sorted({name.partition("::")[0] for name in names if name.partition("::")[0].endswith(".py")})
    return checked_paths(files, "bad_field", refuse)


def _pytest_command(test_files: Sequence[str], refuse: Refuse) -> str:
    """pytest with one line per test at its end; the whole suite where its files are too many to name."""
    command = f"{PYTEST} --tb=no --color=no --disable-warnings -p no:cacheprovider"
    named = " ".join([command, *map(shlex.quote, test_files)])
    return _bounded(shell_command(ACTIVATE, named if len(named) < MAX_COMMAND_BYTES // 2 else command), refuse)


def _apply_command(bug: str) -> str:
    """Put the bug into the project; the mark that ends the text is one that the text does not hold."""
    mark = "END_OF_BUG"
    while mark in bug:
        mark += "_"
    return f"git apply --whitespace=nowarn - <<'{mark}'\n{bug.rstrip(chr(10))}\n{mark}"


def _gold(raw: Mapping[str, Any], refuse: Refuse) -> str:
    patch = text_of(raw, "patch", refuse, default="")
    _touched(patch, "bad_patch", refuse)
    return patch


def _touched(patch: str, reason: str, refuse: Refuse) -> tuple[str, ...]:
    try:
        return checked_paths(touched_paths(patch), reason, refuse)
    except DiffError as error:
        raise refuse(reason, str(error)) from error


def _image(raw: Mapping[str, Any], refuse: Refuse) -> str | None:
    """The image that the row names; None where it names none."""
    for column in IMAGE_COLUMNS:
        name = text_of(raw, column, refuse, default="").strip()
        if name:
            if not _IMAGE.fullmatch(name):
                raise refuse("missing_image", f"{column} names no image: {shown(name)}")
            return name
    return None


def _bounded(command: str, refuse: Refuse) -> str:
    if len(command.encode()) > MAX_COMMAND_BYTES:
        raise refuse("too_large", f"a command of {len(command.encode())} bytes; a program takes {MAX_COMMAND_BYTES}")
    return command
