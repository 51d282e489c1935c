"""What a worker leaves is removed though nobody starts another."""

import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from psrl.sandbox.reaper import find_leftovers

WORKER = """
import os, tempfile, sys
from psrl.sandbox.reaper import FOLDER_PREFIX, worker_label
from psrl.sandbox.reaper_process import start_reaper

folder = tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{worker_label('reaper_test')}-")
print(folder, start_reaper(engine_url=None).pid, flush=True)
sys.stdin.read()
"""


def test_folders_of_a_worker_that_was_killed_are_removed_and_the_reaper_ends():
    worker = subprocess.Popen([sys.executable, "-c", WORKER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    folder, pid = worker.stdout.readline().split()
    reaper = psutil.Process(int(pid))
    assert Path(folder).parent == Path(tempfile.gettempdir()) and Path(folder).exists()
    worker.kill()
    worker.wait()
    psutil.wait_procs([reaper], timeout=30)
    assert not reaper.is_running()
    assert not Path(folder).exists()
    assert find_leftovers("reaper_test").count == 0
