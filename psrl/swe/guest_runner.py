"""The runner's parent: a program sent into a sandbox that has the tests run in a child, and says what that child reported.

Invariant: it never imports a line of the project. It cannot be traced or read by the child (it is undumpable), and what it prints is
signed with a secret that only the host knows. The child's report is a pipe of numbered, signed lines; whatever else arrives there is
tampering. Standard library alone, Python 3.8 or newer.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from typing import Any

PR_SET_DUMPABLE = 4
MAX_REPORT_BYTES = 32 * 2**20
KEPT_OUTPUT_BYTES = 4096
READY_TIMEOUT_S = 30.0
"""For the import of pytest, before any line of the project ran."""
BOOT = """
import json, sys, types
order = json.loads(sys.stdin.buffer.read())
parts = {}
for name in ("watch", "state", "compare", "source"):
    space = {"__name__": "psrl_guest_" + name}
    exec(compile(order.pop(name), "<psrl>", "exec"), space)
    parts[name] = types.SimpleNamespace(**space)
space["main"](order, parts)
"""
KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "TZ")
CANARIES = (
    ("assert", "pf"), ("pass", "pp"), ("unittest", "pf"),
    ("assert_again", "pf"), ("fixture", "f-"), ("raises", "pf"),
    ("raise", "pf"), ("skip", "ps"), ("pass_again", "pp"), ("assert_last", "pf"),
)  # fmt: skip
"""Kinds of tests that the child puts before, between and after the project's, and how their set-up and call must end."""

CANARY_SOURCE = """
import unittest
import pytest


@pytest.fixture
def {fixture_name}():
    raise RuntimeError("{token}")


def {assert}():
    left, right = "{token}", "{token}x"
    assert left == right


def {pass}():
    assert "{token}" == "{token}"


class T{token}(unittest.TestCase):
    def {unittest}(self):
        self.assertEqual("{token}", "{token}y")


def {assert_again}():
    assert not ["{token}"]


def {fixture}({fixture_name}):
    pass


def {raises}():
    with pytest.raises(ValueError):
        str("{token}")


def {raise}():
    raise KeyError("{token}")


def {skip}():
    pytest.skip("{token}")


def {pass_again}():
    assert [1, "{token}"] == [1, "{token}"]


def {assert_last}():
    assert 1 in [2, 3], "{token}"
"""


class Report:
    """What the child said, line by line."""

    def __init__(self, key: bytes) -> None:
        """`key` signs the lines."""
        self._key = key
        self._buffer = b""
        self._size = 0
        self.number = 0
        self.is_ready = False
        self.final: list[str] | None = None
        self.cases: dict[str, tuple[str, str]] = {}
        self.broken_files: dict[str, str] = {}
        self.tampering: list[str] = []

    def feed(self, chunk: bytes) -> None:
        """Take what arrived."""
        self._size += len(chunk)
        if self._size > MAX_REPORT_BYTES:
            self.tampering.append("the report is too long")
            return
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            self._line(line)

    def end(self) -> None:
        """The pipe is at its end."""
        if self._buffer:
            self.tampering.append("half a line stands in the report")

    def _line(self, line: bytes) -> None:
        if line.startswith(b"!"):
            self.tampering.append(line[1:301].decode("utf-8", "replace"))
            return
        body, _, mac = line.rpartition(b" ")
        expected = hashlib.blake2b(b"%d %s" % (self.number, body), key=self._key).hexdigest().encode()
        if not secrets.compare_digest(mac, expected) or self.final is not None:
            self.tampering.append("something else wrote to the report")
            return
        self.number += 1
        fields = [bytes.fromhex(part.decode()).decode("utf-8", "replace") for part in body.split(b",")]
        kind, values = fields[0], fields[1:]
        if kind == "ready":
            self.is_ready = True
        elif kind == "final":
            self.final = values
        elif kind == "broken":
            self.broken_files[values[0]] = values[1]
        elif values[0] in self.cases:
            self.tampering.append(f"{values[0]} was reported twice")
        else:
            self.cases[values[0]] = (values[1], values[2])


def main(job: dict[str, Any]) -> None:
    """Run the child and print the answer: one line of JSON and its signature."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    answer = json.dumps(answer_of(job)).encode()
    mac = hashlib.blake2b(answer, key=bytes.fromhex(job["secret"])).hexdigest()
    sys.stdout.buffer.write(answer + b"\n" + mac.encode() + b"\n")
    sys.stdout.buffer.flush()
    os._exit(0)


def answer_of(job: dict[str, Any]) -> dict[str, Any]:
    """What the host is told."""
    key = secrets.token_bytes(32)
    canaries = {"token": secrets.token_hex(5), **{kind: f"test_{secrets.token_hex(5)}" for kind, _ in CANARIES}}
    report = Report(key)
    started = time.monotonic()
    words, is_late = run_child(job, key, canaries, report)
    statuses = {name: phases for name, (phases, _) in report.cases.items()}
    tampering = report.tampering + canary_faults(report, canaries)
    own = set(canaries.values())
    return {
        "ready": report.is_ready,
        "late": is_late,
        "final": report.final,
        "tampering": tampering[:10],
        "statuses": {name: phases for name, phases in statuses.items() if canary_of(name) not in own},
        "failures": {name: text for name, (_, text) in report.cases.items() if text and canary_of(name) not in own},
        "broken_files": report.broken_files,
        "output": words.decode("utf-8", "replace"),
        "tests_s": time.monotonic() - started,
    }


def canary_of(name: str) -> str:
    """The function's name in a node id."""
    return name.rpartition("::")[2]


def canary_faults(report: Report, canaries: dict[str, str]) -> list[str]:
    """Canaries that passed where they must not, or were left out of a run that says it is complete.

    Only what is said to have passed counts: the project's own hooks may skip or fail tests that they do not know.
    """
    found = {canary_of(name): phases for name, (phases, _) in report.cases.items()}
    is_complete = report.final is not None and report.final[1] == report.final[2] != "0"
    faults = []
    for kind, expected in CANARIES:
        phases = found.get(canaries[kind], "")
        must_not_pass = next((position for position in (0, 1) if expected[position] != "p"), None)
        if not phases and is_complete:
            faults.append(f"a test that must end {expected!r} was left out")
        elif phases and must_not_pass is not None and phases[must_not_pass] == "p":
            faults.append(f"a test that must end {expected!r} ended {phases!r}")
    return faults


def run_child(job: dict[str, Any], key: bytes, canaries: dict[str, str], report: Report) -> tuple[bytes, bool]:
    """Start the tests and listen until they end, their time is over, or their report is complete: (last output, was it late)."""
    listen, speak = os.pipe()
    env = {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES}
    if not job["autoload"]:
        env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    child = subprocess.Popen(
        [sys.executable, "-I", "-B", "-c", BOOT],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=[speak], cwd=job["workdir"], env=env,
    )  # fmt: skip
    os.close(speak)
    packages = [folder for folder in env.get("PYTHONPATH", "").split(":") if folder]
    fields = ("source", "compare", "watch", "state", "workdir", "targets", "added", "made")
    source = CANARY_SOURCE.format(fixture_name="f" + canaries["token"], **canaries)
    order = {
        "fd": speak,
        "key": key.hex(),
        "canaries": canaries,
        "canary_source": source,
        "packages": packages,
        **{name: job[name] for name in fields},
    }
    assert child.stdin is not None and child.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(json.dumps(order).encode())
        child.stdin.close()
    kept, is_late = listen_to(listen, child.stdout.fileno(), report, job["timeout_s"])
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    child.wait()
    return kept, is_late


def listen_to(listen: int, output: int, report: Report, timeout_s: float) -> tuple[bytes, bool]:
    """Read report and output to the report's end. A process that outlives the tests may hold the pipe, so the time bounds it too."""
    deadline = time.monotonic() + timeout_s
    kept, open_fds = b"", {listen, output}
    while listen in open_fds and report.final is None and not report.tampering:
        left = deadline - time.monotonic()
        if left <= 0:
            return kept, True
        for fd in select.select(list(open_fds), [], [], left)[0]:
            chunk = os.read(fd, 65536)
            if not chunk:
                open_fds.discard(fd)
            elif fd == listen:
                report.feed(chunk)
            else:
                kept = (kept + chunk)[-KEPT_OUTPUT_BYTES:]
    if report.final is None:
        report.end()
        while output in open_fds and select.select([output], [], [], 0.2)[0]:
            chunk = os.read(output, 65536)
            if not chunk:
                break
            kept = (kept + chunk)[-KEPT_OUTPUT_BYTES:]
            if time.monotonic() > deadline:
                break
    return kept, False
