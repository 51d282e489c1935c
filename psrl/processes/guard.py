"""`python -m psrl.processes.guard --parent-pid PID`: waits for the end of its parent, then ends what is left of the parent's descendants.

Every process of psrl ends with its parent by itself. Ray's agents do, too, but need a minute for it when their parent was killed, and a
program that stands still never does.

With `--group` it kills the parent's process group at once instead. That is for a server with processes of its own: where it alone is killed
(by hand, for its memory, or by Ray, which kills the children of an actor that ends, and not theirs), it cannot end them itself.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil

POLL_S = 0.2
LOOK_S = 2.0
"""Between two looks at who the descendants are."""
GRACE_S = 8.0
"""In which they end by themselves, and sandboxes are removed."""


def start_guard(*, of_group: bool = False) -> subprocess.Popen[bytes]:
    """A guard of this process, from now until its end. `of_group`: of the group that it leads."""
    argv = [sys.executable, "-m", "psrl.processes.guard", "--parent-pid", str(os.getpid()), *(["--group"] if of_group else [])]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def main() -> int:
    """Wait, for as long as the parent lives; then give its descendants a while, and end them."""
    parser = argparse.ArgumentParser(prog="psrl.processes.guard")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--group", action="store_true")
    arguments = parser.parse_args()
    parent_pid: int = arguments.parent_pid
    if arguments.group:
        return _end_group(parent_pid)
    known: set[psutil.Process] = set()
    look_at = 0.0
    while os.getppid() == parent_pid:
        if time.monotonic() >= look_at:
            known = {process for process in known if process.is_running()} | _descendants_of(parent_pid)
            look_at = time.monotonic() + LOOK_S
        time.sleep(POLL_S)
    _, left = psutil.wait_procs([process for process in known if process.pid != os.getpid()], timeout=GRACE_S)
    for process in left:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.kill()
    return 0


def _end_group(leader_pid: int) -> int:
    while os.getppid() == leader_pid:
        time.sleep(POLL_S)
    with suppress(ProcessLookupError):
        os.killpg(leader_pid, signal.SIGKILL)
    return 0


def _descendants_of(pid: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


if __name__ == "__main__":
    sys.exit(main())
