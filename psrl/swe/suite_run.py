"""One run of a project's tests by psrl's own runner: the order that goes into the sandbox, and the answer that comes out.

The runner is two programs, `guest_runner.py` (after `guest_start.py`) and `guest_pytest.py` (with `guest_compare.py`), sent as text. Pure.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from psrl.errors import EnvironmentFault
from psrl.swe.diffs import DiffError, touched_paths
from psrl.swe.patch import Change
from psrl.swe.pytest_settings import PytestSettings
from psrl.swe.verdict import RunEnd, TestReport, TestStatus
from psrl.types import CommandResult, SweProblem

START = """
import sys, json
job = json.loads(sys.stdin.buffer.read())
space, before = {"__name__": "psrl_guest_runner"}, {"__name__": "psrl_guest_start"}
exec(compile(job.pop("start"), "<psrl>", "exec"), before)
exec(compile(job.pop("runner"), "<psrl>", "exec"), space)
space["KEPT_VARIABLES"] += before["settle"](job.pop("settings"), job["workdir"])
space["main"](job)
"""
SHELL = 'exec "$(command -v python3 || command -v python || echo python3)" -I -B -c "$0"'
"""Which Python is the image's is said by its PATH."""
MAX_WORDS = 600
ENDED_WELL = ("0", "1", "5")
"""pytest's exit status where it ran what it collected: all passed, some failed, there were none."""
LISTENS = (b"in listen_to", b"in canary_faults")
"""Functions of the runner that take what the tests' process said: where they fail, it was that."""
_PHASES = re.compile(r"[pfsxX?-]{3}")
_OF_LETTER = {"p": TestStatus.PASSED, "f": TestStatus.FAILED, "s": TestStatus.SKIPPED, "x": TestStatus.XFAILED, "X": TestStatus.XPASSED}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOrder:
    """What the runner reads, and what its answer is signed with."""

    content: bytes
    secret: bytes


def targets_of(problem: SweProblem, required: Iterable[str] | None) -> tuple[str, ...]:
    """Absolute paths of the test files that hold `required`; None: of all tests that the problem names."""
    names = (*problem.fail_to_pass, *problem.pass_to_pass) if required is None else tuple(required)
    paths = {name.partition("::")[0] for name in names}
    if required is None:
        paths |= {path.strip("/") for path in files_of_tests(problem) if not path.endswith(("conftest.py", "__init__.py"))}
        paths = {path for path in paths if not any(path.startswith(folder + "/") for folder in paths)}
    return tuple(f"{problem.workdir}/{path}" for path in sorted(paths) if path and ".." not in path.split("/"))


def files_of_tests(problem: SweProblem) -> tuple[str, ...]:
    """Files and folders of the tests as the row names them: `test_paths`, and what its `test_patch` touches.

    Raises:
        EnvironmentFault: Its test patch is no diff.
    """
    if not problem.test_patch.strip():
        return problem.test_paths
    try:
        return (*problem.test_paths, *touched_paths(problem.test_patch))
    except DiffError as error:
        raise EnvironmentFault(f"the test patch of {problem.instance_id} is no diff: {error}") from error


def run_script() -> list[str]:
    """The command that starts the runner; it reads a RunOrder."""
    return ["bash", "-c", SHELL, START]


def run_order(
    problem: SweProblem,
    *,
    targets: Sequence[str],
    added_lines: Mapping[str, Sequence[tuple[int, int]]],
    changes: Sequence[Change],
    settings: PytestSettings,
) -> RunOrder:
    """The order to run `targets`.

    Args:
        problem: Whose tests they are.
        targets: Absolute paths.
        added_lines: Of the patch, by path below `workdir`.
        changes: What the patch changed and was not put back.
        settings: What pytest is told beside the project's own.
    """
    secret = secrets.token_bytes(32)
    order = {
        "start": _source("guest_start.py"),
        "settings": {"options": list(settings.options), "pythonpath": list(settings.pythonpath)},
        "runner": _source("guest_runner.py"),
        "source": _source("guest_pytest.py"),
        "compare": _source("guest_compare.py"),
        "watch": _source("guest_watch.py"),
        "state": _source("guest_state.py"),
        "secret": secret.hex(),
        "workdir": problem.workdir,
        "targets": list(targets),
        "timeout_s": problem.timeout_s,
        "autoload": problem.image is not None,
        "added": {f"{problem.workdir}/{change.path}": list(added_lines.get(change.path, ())) for change in changes},
        "made": [f"{problem.workdir}/{change.path}" for change in changes if change.is_new],
    }
    return RunOrder(content=json.dumps(order).encode(), secret=secret)


def read_answer(ended: CommandResult, order: RunOrder) -> TestReport:
    """What the runner said.

    Raises:
        EnvironmentFault: It could not even begin: no Python, no pytest.
    """
    answer = _signed_answer(ended.stdout, order.secret)
    if answer is None:
        return _without_answer(ended)
    if answer["tampering"]:
        return TestReport(end=RunEnd.TAMPERED, detail=str(answer["tampering"][0]))
    if not answer["ready"]:
        words = answer["output"].strip()[-MAX_WORDS:] or ("it took too long" if answer["late"] else "it ended without a word")
        raise EnvironmentFault(f"pytest cannot be started in the sandbox: {words}. Fix: list pytest in sandbox.packages, or in the image")
    odd = _oddity_of(answer)
    if odd:
        return TestReport(end=RunEnd.TAMPERED, detail=odd)
    end, detail = _end_of(answer)
    statuses = {name: status_of(phases) for name, phases in answer["statuses"].items()}
    statuses |= {name: TestStatus.ERROR for name in answer["broken_files"]}
    return TestReport(statuses=statuses, end=end, detail=detail, failures={**answer["failures"], **answer["broken_files"]})


def status_of(phases: str) -> TestStatus:
    """Of a test's set-up, call and tear-down, one letter each: passed, failed, skipped, x expected to fail, X passed against that.

    Example:
        "ppp" passed; "pfp" failed; "f-p" error; "ppf" error; "s-p" skipped; "pXp" passed though expected to fail.
    """
    setup, call, teardown = phases[0], phases[1], phases[2]
    if setup in "sx" and teardown != "f":
        return _OF_LETTER[setup]
    if setup != "p" or teardown != "p":
        return TestStatus.ERROR
    return _OF_LETTER.get(call, TestStatus.ERROR)


def _without_answer(ended: CommandResult) -> TestReport:
    words = (ended.stderr or ended.stdout).decode("utf-8", "replace").strip()[-MAX_WORDS:]
    has_failed = ended.exit_code not in (0, None) and b"<psrl>" in ended.stderr
    if has_failed and any(name in ended.stderr for name in LISTENS):
        return TestReport(end=RunEnd.TAMPERED, detail=f"the report cannot be read: {words}"[:MAX_WORDS])
    if ended.exit_code == 127 or has_failed:
        raise EnvironmentFault(f"the runner of the tests cannot start: {words}. Fix: an image with Python 3.8 or newer")
    why = ended.killed_by or f"exit code {ended.exit_code}"
    end = RunEnd.TIMEOUT if ended.killed_by in ("wall_time", "cpu_time") else RunEnd.NO_REPORT
    return TestReport(end=end, detail=f"the runner was ended ({why}): {words}"[:MAX_WORDS])


def _oddity_of(answer: Mapping[str, Any]) -> str:
    """What no report of the runner's own child says; empty where there is none. Whoever signed it, it is no report of tests."""
    final = answer["final"]
    if final is not None and not (len(final) == 3 and all(isinstance(each, str) and each.isascii() and each.isdigit() for each in final)):
        return f"the report ends with {final!r:.100}"
    for name, phases in answer["statuses"].items():
        if not (isinstance(phases, str) and _PHASES.fullmatch(phases)):
            return f"the report says {phases!r:.40} of {name:.100}"
    texts = (*answer["failures"].values(), *answer["broken_files"].values())
    return "" if all(isinstance(text, str) for text in texts) else "the report says what is no text"


def _end_of(answer: Mapping[str, Any]) -> tuple[RunEnd, str]:
    if answer["late"]:
        return RunEnd.TIMEOUT, "the tests did not end in time"
    words = answer["output"].strip()[-MAX_WORDS:]
    if answer["final"] is None:
        return RunEnd.NO_REPORT, f"the tests' process ended early: {words}"
    exit_status, num_items, num_run = answer["final"]
    if num_items != num_run or exit_status not in ENDED_WELL:
        return RunEnd.NO_REPORT, f"the tests ended after {num_run} of {num_items}: {words}"
    return RunEnd.COMPLETE, ""


def _signed_answer(output: bytes, secret: bytes) -> dict[str, Any] | None:
    body, _, rest = output.partition(b"\n")
    mac = hashlib.blake2b(body, key=secret).hexdigest().encode()
    if not hmac.compare_digest(mac, rest.strip()):
        return None
    answer: dict[str, Any] = json.loads(body)
    return answer


@cache
def _source(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
