"""Nothing outlives a worker: children die with it by the kernel's hand, and the reaper removes and counts the rest."""

import os
import secrets
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


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """Folders of these tests lie where no other run of this machine reaps."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def unique(run):
    return f"{run}_{secrets.token_hex(8)}"


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
    run = unique(f"reaper_{backend}")
    killed_worker(run, backend, "import time\ntime.sleep(60)")
    assert wait_until_none(run)
    reap(run)
    assert find_leftovers(run).count == 0


def test_the_reaper_removes_daemons_and_folders_of_a_dead_worker_without_isolation():
    run = unique("reaper_daemon")
    killed_worker(run, "process", "import subprocess, time\nsubprocess.Popen(['sleep', '77'], start_new_session=True)\ntime.sleep(60)")
    folders = find_leftovers(run).folders
    assert len(folders) == 2
    assert reap(run).folders == folders
    assert wait_until_none(run)
    assert find_leftovers(run).count == 0
    assert not any(Path(folder).exists() for folder in folders)


def test_what_a_live_worker_holds_is_not_touched():
    with tempfile.TemporaryDirectory(prefix=f"{FOLDER_PREFIX}{worker_label('alive')}-") as folder:
        assert find_leftovers().folders == ()
        assert reap().folders == ()
        assert os.path.isdir(folder)


def dead_workers_folder(run):
    """A folder with the label that a worker of this machine had, who is dead."""
    label_of_dead = "import sys\nfrom psrl.sandbox import worker_label\nprint(worker_label(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", label_of_dead, run], cwd=ROOT, capture_output=True, text=True, check=True)
    return Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{done.stdout.strip()}-"))


@pytest.mark.parametrize("run", ["gsm8k", "größe 7B/α"])
def test_what_dead_workers_of_any_run_left_is_found_whatever_the_runs_name(run):
    folder = dead_workers_folder(run)
    assert find_leftovers(run).folders == (str(folder),)
    assert find_leftovers("another").folders == ()
    assert reap().folders == (str(folder),)
    assert not folder.exists()


REAP_AS_USER = """
import os, sys
from psrl.sandbox import find_leftovers, reap
os.setgroups([]), os.setgid(1234), os.setuid(1234)
print(int(sys.argv[2]) in find_leftovers(sys.argv[1]).pids, reap(sys.argv[1]).count)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
def test_what_another_user_left_is_neither_an_error_nor_said_to_be_removed():
    run = unique("theirs")
    folder = dead_workers_folder(run)
    # In the command line, since the environment is closed to other users.
    theirs = subprocess.Popen(["sh", "-c", "read line", str(folder)], stdin=subprocess.PIPE)
    try:
        argv = [sys.executable, "-c", REAP_AS_USER, run, str(theirs.pid)]
        done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.stdout.split() == ["True", "0"], done.stderr
        assert theirs.poll() is None
    finally:
        theirs.communicate(b"\n")
