"""`python -m psrl.sandbox.reaper_process --parent-pid PID`: waits for the end of its parent and removes what that left.

Whoever starts a worker reaps what dead ones left. This program is for when nobody will: after a kill -9 of a whole run.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time

from psrl.sandbox.reaper import find_leftovers, reap

POLL_S = 0.5
PATIENCE_S = 20.0
"""Processes of a sandbox die with their worker, one after the other; what is still there then is left to the next worker's start."""


def start_reaper(*, engine_url: str | None) -> subprocess.Popen[bytes]:
    """A reaper of this process; whoever ends well may kill it."""
    argv = [sys.executable, "-m", "psrl.sandbox.reaper_process", "--parent-pid", str(os.getpid())]
    argv += ["--engine-url", engine_url] if engine_url is not None else []
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)


def main() -> int:
    """Wait, for as long as the parent lives; then reap until nothing is left."""
    parser = argparse.ArgumentParser(prog="psrl.sandbox.reaper_process")
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--engine-url", default=None, help="of the Docker Engine; default: the usual socket")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while os.getppid() == arguments.parent_pid:
        time.sleep(POLL_S)
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        reap(engine_url=arguments.engine_url)
        if find_leftovers(engine_url=arguments.engine_url).count == 0:
            return 0
        time.sleep(POLL_S)
    return 1


if __name__ == "__main__":
    sys.exit(main())
