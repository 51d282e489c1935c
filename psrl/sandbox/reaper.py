"""Finds and removes what a dead worker left: processes, temporary folders and containers that carry its label.

The first line of defence is the kernel (children die with their worker); this one counts that nothing is left. A label names
the run, the pid namespace, and the worker by pid and start time, so a live worker's sandboxes and those of another
container that shares /tmp are never touched.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from psrl.sandbox.leftover_containers import labelled_containers, remove_containers

FOLDER_PREFIX = "psrl-sandbox-"
MAX_KILL_ROUNDS = 10
NOT_OURS_TO_END = (ProcessLookupError, PermissionError)
"""It ended since the listing, or belongs to another user, whose own reaper will end it."""
LABEL = re.compile(rb"(?:PSRL_SANDBOX[=\0]|psrl-sandbox-)(\w+\.\d+\.\d+\.\d+)")

LABEL_TEXT = re.compile(r"\w+\.\d+\.\d+\.\d+", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftovers:
    """What carries the label of a worker that is dead."""

    pids: tuple[int, ...]
    folders: tuple[str, ...]
    containers: tuple[str, ...] = ()
    """Ids, of the Engine that was asked."""

    @property
    def count(self) -> int:
        """0 when everything is clean."""
        return len(self.pids) + len(self.folders) + len(self.containers)


def worker_label(run: str) -> str:
    """The label of what this process starts for `run`."""
    return ".".join((_label_part(run), str(_pid_namespace()), str(os.getpid()), str(_start_ticks(os.getpid()))))


def find_leftovers(run: str | None = None, *, engine_url: str | None = None) -> Leftovers:
    """What belongs to dead workers of one run, or of every run of this machine.

    Containers are looked for where the Engine of `engine_url` (None: the usual socket) is there and answers at once.
    """
    pids = [pid for pid, label in labelled_processes().items() if _is_orphan(label, run)]
    folders = []
    for path in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        found = LABEL.search(os.fsencode(path.name))
        if found and _is_orphan(found[1].decode(), run):
            folders.append(str(path))
    containers = [
        found for found, label in labelled_containers(engine_url).items() if LABEL_TEXT.fullmatch(label) and _is_orphan(label, run)
    ]
    return Leftovers(pids=tuple(pids), folders=tuple(folders), containers=tuple(containers))


def reap(run: str | None = None, *, engine_url: str | None = None) -> Leftovers:
    """Remove the leftovers on this machine; returns those that it removed, not those of other users.

    For each worker to call before it starts sandboxes: it blocks for as long as reading /proc takes, and never raises. Workers
    may call it at the same time.
    """
    found = find_leftovers(run, engine_url=engine_url)
    pids = tuple(pid for pid in found.pids if _kill(pid))
    for folder in found.folders:
        shutil.rmtree(folder, ignore_errors=True)
    return Leftovers(
        pids=pids,
        folders=tuple(folder for folder in found.folders if not os.path.exists(folder)),
        containers=remove_containers(engine_url, found.containers),
    )


def kill_all_that_mention(folder: str) -> None:
    """Kill the processes whose command line or environment names a sandbox's folder, until none is left or ten rounds were not enough."""
    for _ in range(MAX_KILL_ROUNDS):
        found = [pid for pid, text in _process_texts() if os.fsencode(folder) in text]
        if not found:
            return
        for pid in found:
            _kill(pid)


def labelled_processes() -> dict[int, str]:
    """Label by pid of every process that psrl started for a sandbox and that has not ended."""
    matches = {pid: LABEL.search(text) for pid, text in _process_texts()}
    return {pid: match[1].decode() for pid, match in matches.items() if match}


def _kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except NOT_OURS_TO_END:
        return False
    return True


def _process_texts() -> Iterator[tuple[int, bytes]]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        text = b""
        # The guest's environment is closed to ordinary users, its command line is not.
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):  # ended, or another user's
                text += (entry / name).read_bytes() + b"\0"
        yield int(entry.name), text


def _is_orphan(label: str, run: str | None) -> bool:
    owner_run, namespace, pid, start = label.split(".")
    if run is not None and owner_run != _label_part(run):
        return False
    return int(namespace) == _pid_namespace() and _start_ticks(int(pid)) != int(start)


def _label_part(run: str) -> str:
    """A run's name as labels hold it, in the characters that LABEL finds."""
    assert run, "what carries a label without a run is never found again"
    return re.sub(r"\W", "_", run, flags=re.ASCII)


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_ticks(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2].split()
    except OSError:  # no such process
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
