"""What is left of a run that was killed is ended."""

import subprocess
import sys
import time

import psutil
import pytest

PARENT = """
import subprocess, sys
from psrl.processes import guard

child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
print(guard.start_guard().pid, child.pid, flush=True)
sys.stdin.read()
"""


def until_it_looked(guard: psutil.Process) -> None:
    """A guard sleeps between two looks; the first comes before the first sleep, after its imports."""
    deadline = time.monotonic() + 30
    while not any("psutil" in mapped.path for mapped in guard.memory_maps()) or guard.status() != psutil.STATUS_SLEEPING:
        assert time.monotonic() < deadline


def test_a_descendant_that_would_live_on_is_ended_when_its_ancestor_was_killed_and_the_guard_ends(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    guard, child = map(psutil.Process, map(int, parent.stdout.readline().split()))
    until_it_looked(guard)
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs([guard, child], timeout=30)
    assert alive == []


LEADER = """
import subprocess, sys
from psrl.processes.guard import start_guard

print(start_guard(of_group=True).pid, subprocess.Popen(["sleep", "600"]).pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "ended by itself"])
def test_what_a_server_has_started_ends_with_it_and_so_does_the_guard_of_its_group(is_killed):
    argv = [sys.executable, "-c", LEADER]
    leader = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    both = list(map(psutil.Process, map(int, leader.stdout.readline().split())))
    if is_killed:
        leader.kill()
    leader.communicate(timeout=30)  # the end of its input
    assert psutil.wait_procs(both, timeout=30)[1] == []
