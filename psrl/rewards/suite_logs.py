"""What the output of a row's own test command says of each test, read by the released `swebench` package's parsers.

The output is what the sandbox gave the host, so no file inside can be forged; lines printed by the code under test are part of it. A
test of which it says two things is contradicted, and so not passed. The parsers run in child processes: what they read is hostile.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from psrl.errors import RewardError, SandboxUnavailableError
from psrl.rewards.graders import GraderFailedError, GraderLoadError, GraderPool, GraderSilentError
from psrl.swe.verdict import RunEnd, TestReport, TestStatus
from psrl.types import CommandResult, SweProblem

Parser = Callable[[str, Any], dict[str, str]]
NOT_INSTALLED = "the package swebench is not installed"
MAX_NAMING_LINES = 50_000
"""Different lines that name required tests, and NAMED_PER_TEST of each: honest logs name a test a few times."""
NAMED_PER_TEST = 20
_NOISE = re.compile(r"\x1b?\[[0-9;]*m|[\x01-\x1f]")
STATUSES = {
    "PASSED": TestStatus.PASSED,
    "FAILED": TestStatus.FAILED,
    "ERROR": TestStatus.ERROR,
    "SKIPPED": TestStatus.SKIPPED,
    "XFAIL": TestStatus.XFAILED,
}


class LogParsers:
    """Children that read logs; started when first needed."""

    def __init__(self, *, num_processes: int, timeout_s: float) -> None:
        """`timeout_s` bounds the reading of one log."""
        self._pool = GraderPool(arguments=("test_log",), num_processes=num_processes, timeout_s=timeout_s)

    async def read(self, problem: SweProblem, ended: CommandResult) -> TestReport:
        """The report of a test command that ended.

        Raises:
            SandboxUnavailableError: `swebench` is not installed.
            RewardError: There is no parser of that name.
        """
        if ended.killed_by in ("wall_time", "cpu_time"):
            return TestReport(end=RunEnd.TIMEOUT, detail=f"the tests did not end in {problem.timeout_s:g} s")
        request = {
            "parser": problem.log_parser,
            "log": (ended.stdout + ended.stderr).decode("utf-8", "replace"),
            "instance_id": problem.instance_id,
            "repo": problem.repo,
            "fail_to_pass": list(problem.fail_to_pass),
            "pass_to_pass": list(problem.pass_to_pass),
        }
        try:
            reply = await self._pool.grade(request)
        except GraderLoadError as error:
            fix = "pip install 'psrl[swe]'"
            raise SandboxUnavailableError(f"rows with a test_command need the parsers of swebench: {error}. Fix: {fix}") from error
        except GraderFailedError as error:  # what is printed is the patch's: it may not choose to have no reward
            return TestReport(end=RunEnd.NO_REPORT, detail=f"{problem.log_parser} cannot read the log: {error}")
        except GraderSilentError as error:
            return TestReport(end=RunEnd.TIMEOUT, detail=f"{problem.log_parser} does not come to the log's end: {error}")
        if "unknown_parser" in reply:
            raise RewardError(reply["unknown_parser"])
        return report_of(problem, reply["statuses"], ended)

    async def close(self) -> None:
        """Kill the children."""
        await self._pool.close()


def report_of(problem: SweProblem, statuses: Mapping[str, str], ended: CommandResult) -> TestReport:
    """The report that parsed lines and the command's end make together.

    A command that fails although no test did describes another run than the one that happened; its lines are worth nothing.
    """
    read = {name: TestStatus(status) for name, status in statuses.items()}
    words = (ended.stdout + ended.stderr).decode("utf-8", "replace").strip()[-600:]
    if ended.killed_by is not None:
        return TestReport(end=RunEnd.NO_REPORT, detail=f"the test command was ended ({ended.killed_by}): {words}")
    bad = (TestStatus.FAILED, TestStatus.ERROR, TestStatus.CONTRADICTED)
    if ended.exit_code != 0 and not any(status in bad for status in read.values()):
        return TestReport(end=RunEnd.NO_REPORT, detail=f"the test command failed ({ended.exit_code}) and no test did: {words}")
    for name in (*problem.fail_to_pass, *problem.pass_to_pass):
        if name not in read and name.count("[") > name.count("]"):
            found = {status for full, status in read.items() if full.startswith(name)}
            read |= {name: found.pop()} if len(found) == 1 else {}
    return TestReport(statuses=read)


def load_parsers() -> dict[str, Parser]:
    """The parsers of the installed `swebench` by name.

    Its package `swebench.harness` imports Docker, Modal and more; the parsers below it need none of that, so they are imported
    beneath an empty package of that name, which is taken away again.

    Raises:
        RewardError: It is not installed.
    """
    spec = importlib.util.find_spec("swebench")
    if spec is None or not spec.submodule_search_locations:
        raise RewardError(NOT_INSTALLED)
    name = "swebench.harness"
    shell = types.ModuleType(name)
    shell.__path__ = [str(Path(next(iter(spec.submodule_search_locations))) / "harness")]
    had = name in sys.modules
    sys.modules.setdefault(name, shell)
    try:
        parsers: dict[str, Parser] = importlib.import_module(f"{name}.log_parsers").PARSER_REGISTRY
        return dict(parsers)
    finally:
        if not had:
            del sys.modules[name]


def read_log(parsers: Mapping[str, Parser], request: Mapping[str, Any]) -> dict[str, Any]:
    """{"statuses": by test}, or {"unknown_parser": why}.

    Parsers keep a test's last word. That each of its words is the same is asked of the log read backwards, and of every line alone that
    names a required test; where such lines are too many to be of an honest log, no required test has passed.
    """
    if request["parser"] not in parsers:
        known = ", ".join(sorted(parsers))
        return {"unknown_parser": f"swebench has no log parser named {request['parser']!r}; it has {known}"}
    spec = _spec_of(request)
    parse, log = parsers[request["parser"]], request["log"]
    statuses = {name: STATUSES[status].value for name, status in parse(log, spec).items() if status in STATUSES}
    required = (*request["fail_to_pass"], *request["pass_to_pass"]) or tuple(statuses)
    lines = log.split("\n")
    naming = naming_lines(lines, required)
    if len(naming) > MAX_NAMING_LINES + NAMED_PER_TEST * len(required):
        return {"statuses": {**statuses, **dict.fromkeys(required, TestStatus.CONTRADICTED.value)}}
    for other in ("\n".join(reversed(lines)), *naming):
        for name, status in parse(other, spec).items():
            if name in statuses and status in STATUSES and STATUSES[status].value != statuses[name]:
                statuses[name] = TestStatus.CONTRADICTED.value
    return {"statuses": statuses}


def naming_lines(lines: Iterable[str], required: Iterable[str]) -> list[str]:
    """The different lines in which a word begins as a required test's name does, before its parameters.

    What parsers overlook, colours and control characters, is overlooked here too.

    Example:
        Of "t.py::test_a[1 2]": "PASSED t.py::test_a[1", "t.py::test_a[3] FAILED" and "see t.py::test_a", not "t.py::test_ab PASSED".
    """
    known = {_stem(word) for name in required for word in name.split()[:1]}
    return [line for line in dict.fromkeys(lines) if any(_stem(word) in known for word in (*line.split(), *_NOISE.sub("", line).split()))]


def _stem(word: str) -> str:
    return word.partition("[")[0]


def _spec_of(request: Mapping[str, Any]) -> Any:
    spec_class = importlib.import_module("swebench.types").TestSpec
    return spec_class(
        instance_id=request["instance_id"],
        image="",
        eval_script_list=[],
        repo=request["repo"],
        version="",
        FAIL_TO_PASS=request["fail_to_pass"],
        PASS_TO_PASS=request["pass_to_pass"],
        log_parser=request["parser"],
        eval_type="pass_and_fail",
    )
