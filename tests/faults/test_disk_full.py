"""A disk that fills up at random moments of a run that saves after every step: the run stops with the cause within 60 s, its last
checkpoint is whole, and it goes on once there is room."""

import errno
import os
import subprocess
import time

import pytest

from tests.faults.faulty_run import NUM_INJECTIONS, POLL_S, STOP_LIMIT_S, FaultyRun

pytestmark = pytest.mark.slow

DISK_MB = 96
LARGEST_REST = 9 * 2**20
"""Bytes that are left at most: less than a checkpoint of the tiny model."""


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own; it needs the right to mount."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_stops_the_run_with_the_cause_and_its_last_checkpoint_is_whole(tmp_path, small_disk):
    run = FaultyRun(tmp_path, "full disk", runs=small_disk, settings=("trainer.save_freq=1", "trainer.max_ckpt_to_keep=2"))
    run.begin()
    run.until_steps(2)
    filler = small_disk / "filler"
    for number in range(1, NUM_INJECTIONS + 1):
        pause_s = run.moment(4.0)
        rest, step, began = run.random.randrange(LARGEST_REST), run.num_steps(), time.monotonic()
        while run.now.process.poll() is None and time.monotonic() - began < STOP_LIMIT_S:
            fill(filler, rest)  # also what a checkpoint that is removed gives back
            run.now.look()
            time.sleep(POLL_S)
        output = run.now.output(POLL_S)
        run.report(
            number,
            f"{pause_s:.1f} s after a step, at step {step}: {rest / 2**20:.1f} MiB left, ended in {time.monotonic() - began:.1f} s",
        )
        assert run.now.process.returncode == 1, output
        assert any(cause in output for cause in ("CheckpointError", "RunFolderError")), output
        filler.unlink()
        run.check_nothing_is_left()
        if number < NUM_INJECTIONS:
            run.go_on()
            run.until_steps(2)
    run.finish()
    run.check_record()


def fill(filler, rest: int) -> None:
    """Take all of the disk but `rest` bytes, as far as the run leaves it."""
    with open(filler, "ab") as file:
        status = os.statvfs(filler.parent)
        surplus = status.f_bavail * status.f_frsize - rest
        if surplus > 0:
            try:
                os.posix_fallocate(file.fileno(), file.tell(), surplus)
            except OSError as error:  # the run was faster
                if error.errno != errno.ENOSPC:
                    raise
