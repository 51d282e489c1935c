"""Faults that end a run: within 60 s, with the cause in the output and in errors.jsonl, leaving nothing behind; and the run goes on
afterwards where its last checkpoint was. Twenty times at random moments, each time in the run that went on."""

import signal
import time

import pytest

from tests.faults.faulty_run import NUM_INJECTIONS, STOP_LIMIT_S, FaultyRun, kill

pytestmark = pytest.mark.slow

CHECKPOINTS = ("trainer.save_freq=1",)
KINDS = {
    "train worker": (("ray::TrainWorkerActor",), "train worker 0 died"),
    "TransferQueue controller": (("ray::TransferQueueController",), "TransferQueue's controller died"),
    "TransferQueue storage": (("ray::SimpleStorageUnit",), "TransferQueue's storage unit 0 died"),
    "raylet": (("raylet /",), "Ray died: its process raylet"),
    "GCS": (("gcs_server /",), "Ray died: its process gcs_server"),
}
"""Kind -> words of its name and command line, the cause as it is told."""


@pytest.mark.parametrize("kind", KINDS)
def test_a_death_that_the_run_cannot_outlive_is_named_and_the_run_goes_on_later(tmp_path, kind):
    words, cause = KINDS[kind]
    run = FaultyRun(tmp_path, kind, settings=CHECKPOINTS)
    run.begin()
    run.until_steps(1)
    for number in range(1, NUM_INJECTIONS + 1):
        pause_s = run.moment(4.0)
        victim, step, began = run.until_alive(words), run.num_steps(), time.monotonic()
        kill(victim)
        output = run.now.output(STOP_LIMIT_S)
        run.report(number, f"{pause_s:.1f} s after a step, at step {step}: ended in {time.monotonic() - began:.1f} s")
        assert run.now.process.returncode == 1, output
        assert cause in output.replace("\n", " "), output
        assert [error for error in run.errors() if error.unit == "run" and error.message.startswith(cause)], run.errors()[-3:]
        run.check_nothing_is_left()
        if number < NUM_INJECTIONS:
            run.go_on()
            run.until_steps(1)
    run.finish()
    run.check_record()


def test_a_driver_that_is_killed_leaves_nothing_and_the_run_goes_on_later(tmp_path):
    run = FaultyRun(tmp_path, "driver", settings=CHECKPOINTS)
    run.begin()
    run.until_steps(1)
    for number in range(1, NUM_INJECTIONS + 1):
        pause_s = run.moment(4.0)
        step = run.num_steps()
        run.now.look()
        run.now.process.kill()
        run.now.process.wait()
        began = time.monotonic()
        run.check_nothing_is_left()
        run.report(number, f"{pause_s:.1f} s after a step, at step {step}: nothing left after {time.monotonic() - began:.1f} s")
        if number < NUM_INJECTIONS:
            run.go_on()
            run.until_steps(1)
    run.finish()
    run.check_record()


def test_sigterm_saves_and_ends_well_and_the_run_goes_on_later(tmp_path):
    run = FaultyRun(tmp_path, "SIGTERM")
    run.begin()
    for number in range(1, NUM_INJECTIONS + 1):
        pause_s = run.moment(4.0)
        step, began = run.num_steps(), time.monotonic()
        run.now.process.send_signal(signal.SIGTERM)
        output = run.now.output(STOP_LIMIT_S)
        run.report(number, f"{pause_s:.1f} s after a step, at step {step}: ended in {time.monotonic() - began:.1f} s")
        assert run.now.process.returncode == 0, output
        assert run.run_folder.has_checkpoint
        run.check_nothing_is_left()
        if number < NUM_INJECTIONS:
            run.go_on()
            run.until_steps(1)
    run.finish()
    run.check_record()
