"""Faults that end a run: within 60 s, with the cause in the output and in errors.jsonl, leaving nothing behind; and the run goes on
afterwards where its last checkpoint was. Twenty times at random moments, each time in the run that went on."""

import signal
import time
from collections.abc import Sequence

import pytest

from tests.faults.faulty_run import NUM_INJECTIONS, STOP_LIMIT_S, FaultyRun, kill

pytestmark = pytest.mark.slow

DRIVER, SIGTERM = "driver", "SIGTERM"
DEATHS = {
    "train worker": (("ray::TrainWorkerActor",), "train worker 0 died"),
    "TransferQueue controller": (("ray::TransferQueueController",), "TransferQueue's controller died"),
    "TransferQueue storage": (("ray::SimpleStorageUnit",), "TransferQueue's storage unit 0 died"),
    "raylet": (("raylet /",), "Ray died: its process raylet"),
    "GCS": (("gcs_server /",), "Ray died: its process gcs_server"),
}
"""Kind -> words of its name and command line, the cause as it is told."""
KINDS = (*DEATHS, DRIVER, SIGTERM)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_that_the_run_cannot_outlive_is_named_and_the_run_goes_on_later(tmp_path, kind):
    play(FaultyRun(tmp_path, kind, settings=("trainer.save_freq=1",)), [kind] * NUM_INJECTIONS)


def test_a_run_goes_on_after_one_fault_of_each_kind(tmp_path):
    run = FaultyRun(tmp_path, "one after another", settings=("trainer.save_freq=1",))
    play(run, run.random.sample(KINDS, len(KINDS)))


def play(run: FaultyRun, kinds: Sequence[str]) -> None:
    """One fault after the other, each time in the run that went on; then the run comes to its end."""
    run.begin()
    run.until_steps(1)
    for number, kind in enumerate(kinds, 1):
        pause_s = run.moment(4.0)
        step, began = run.num_steps(), time.monotonic()
        if kind in DEATHS:
            check_death(run, kind)
        elif kind == DRIVER:
            run.now.look()
            run.now.process.kill()
            run.now.process.wait()
        else:
            run.now.process.send_signal(signal.SIGTERM)
            output = run.now.output(STOP_LIMIT_S)
            assert run.now.process.returncode == 0, output
        ended_s = time.monotonic() - began
        run.check_nothing_is_left()
        run.report(
            number,
            f"{kind}, {pause_s:.1f} s after a step, at step {step}: ended in {ended_s:.1f} s, "
            f"nothing left after {time.monotonic() - began:.1f} s",
        )
        if number < len(kinds):
            run.go_on()
            run.until_steps(1)
    run.finish()
    run.check_record()


def check_death(run: FaultyRun, kind: str) -> None:
    """Kill one of the kind: the run ends in time and says why."""
    words, cause = DEATHS[kind]
    kill(run.until_alive(words))
    output = run.now.output(STOP_LIMIT_S)
    assert run.now.process.returncode == 1, output
    assert cause in output.replace("\n", " "), output
    assert [error for error in run.errors() if error.unit == "run" and error.message.startswith(cause)], run.errors()[-3:]
