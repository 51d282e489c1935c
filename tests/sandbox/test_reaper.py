"""Nothing outlives a worker: children die with it by the kernel's hand, and the reaper removes and counts the rest."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from psrl.sandbox.reaper import FOLDER_PREFIX, find_leftovers, labelled_processes, reap, worker_label

ROOT = Path(__file__).parents[2]
WORKER = """
import asyncio, sys
from psrl.config.sandbox import SandboxConfig
from psrl.sandbox import build_interpreter

async def play():
    interpreter = build_interpreter(SandboxConfig(backend=sys.argv[2], num_workers=2, wall_s=60), run=sys.argv[1])
    await interpreter.start()
    program = asyncio.create_task(interpreter.run_program(sys.argv[3]))
    await asyncio.sleep(0)
    print("running", flush=True)
    await program

asyncio.run(play())
"""


def processes_of(run):
    return [pid for pid, label in labelled_processes().items() if label.startswith(f"{run}.")]


def wait_until_none(run, within_s=10.0):
    deadline = time.monotonic() + within_s
    while processes_of(run):
        assert time.monotonic() < deadline, f"processes of {run} are left: {processes_of(run)}"
    return True


def killed_worker(run, backend, program):
    """Start a real worker, kill it with SIGKILL in the middle of a program."""
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, run, backend, program], cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True
    )
    assert worker.stdout.readline() == b"running\n"
    assert len(processes_of(run)) >= 2
    worker.send_signal(signal.SIGKILL)
    worker.wait(10)
    worker.stdout.close()


@pytest.mark.parametrize("backend", ["bubblewrap", "process"])
def test_a_worker_killed_by_sigkill_leaves_no_process(backend):
    run = f"reaper_{backend}"
    killed_worker(run, backend, "import time\ntime.sleep(60)")
    assert wait_until_none(run)
    reap(run)
    assert find_leftovers(run).count == 0


def test_the_reaper_removes_daemons_and_folders_of_a_dead_worker_without_isolation():
    run = "reaper_daemon"
    killed_worker(run, "process", "import subprocess, time\nsubprocess.Popen(['sleep', '77'], start_new_session=True)\ntime.sleep(60)")
    folders = find_leftovers(run).folders
    assert len(folders) == 2
    assert reap(run).folders == folders
    assert wait_until_none(run)
    assert find_leftovers(run).count == 0
    assert not any(Path(folder).exists() for folder in folders)


def test_what_a_live_worker_holds_is_not_touched():
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}{worker_label('alive')}-") as folder:
        assert find_leftovers("alive").count == 0
        reap("alive")
        assert os.path.isdir(folder)
