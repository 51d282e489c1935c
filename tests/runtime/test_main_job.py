"""The main job through all real parts: it learns, survives nothing silently, and goes on where it was."""

import signal
import time

import pytest

from psrl.telemetry.errors_log import read_errors
from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.trajectories import read_trajectories
from tests.runtime.command import Command, start

SMALL = (
    "data.generator.num_val=8",
    "data.train_batch_size=4",
    "psrl.rollout_n=4",
    "train_actor_rollout_ref.rollout.n=1",
    "trainer.test_freq=0",
    "trainer.trajectories_per_step=0",
)
EXIT_LIMIT_S = 60.0


def train(folder, steps: int, *more: str) -> Command:
    return start(
        folder, "train", "retool_tiny", *SMALL, f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={folder}", *more
    )


def run_folder(folder) -> RunFolder:
    found = RunFolder.latest(folder, "retool_tiny")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run of four steps that nothing disturbs."""
    folder = tmp_path_factory.mktemp("unbroken")
    command = train(folder, 4)
    output = command.output(300)
    assert command.process.returncode == 0, output
    assert command.leftovers() == []
    return command, folder, output


def test_a_run_leaves_curves_episodes_weights_and_a_report(unbroken):
    command, folder, output = unbroken
    run = run_folder(folder)
    assert sorted(command.metrics()) == [0, 1, 2, 3, 4]
    assert "val/greedy/accuracy" in command.metrics()[0]
    assert "val/mean_at_n/accuracy" in command.metrics()[4]
    assert run.report.read_text().startswith("<!doctype html>")
    assert (run.path / "model" / "config.json").exists()
    assert list(run.tensorboard.iterdir())
    assert list(read_errors(run.errors)) == []
    assert "val greedy after" in output


def test_engine_and_trainer_agree_on_every_token(unbroken):
    command, _, _ = unbroken
    gaps = [metrics["train/logprob_gap/max"] for step, metrics in command.metrics().items() if step > 0]
    assert len(gaps) == 4
    assert max(gaps) < 1e-4


def test_trained_episodes_are_exactly_on_policy(unbroken):
    _, folder, _ = unbroken
    for record in read_trajectories(run_folder(folder).trajectories / "train.jsonl"):
        for trajectory in record.episode.result.trajectories:
            assert {version for version in trajectory.versions() if version >= 0} == {record.step - 1}
            assert len(trajectory.ids()) == len(trajectory.loss_mask()) == len(trajectory.logprobs())


def test_tool_answers_are_read_and_never_trained_on(unbroken):
    _, folder, _ = unbroken
    with_tool = [
        record
        for record in read_trajectories(run_folder(folder).trajectories / "train.jsonl")
        if record.episode.result.counts["tool_calls"]
    ]
    assert with_tool
    for record in with_tool:
        first = record.episode.result.trajectories[0]
        assert first.num_sampled < first.num_tokens
        assert "<tool_call>" in record.episode.result.turn_texts[0]


def resume_and_compare(folder, reference: Command) -> None:
    """Go on with the run and hold its curve against the unbroken one."""
    resumed = train(folder, 4, "--resume")
    output = resumed.output(300)
    assert resumed.process.returncode == 0, output
    # The same tasks, seeds and weights: the curve is the unbroken run's, but for the order in which floats are added.
    for step in range(1, 5):
        for name in ("reward/episode/mean", "generation/tokens/count"):
            assert resumed.metrics()[step][name] == pytest.approx(reference.metrics()[step][name], rel=0.02, abs=0.02), (step, name)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        pytest.param(("ray::TrainWorkerActor",), "train worker 0", marks=pytest.mark.slow),
        pytest.param(("ray::AgentWorkerActor",), "agent worker 0", marks=pytest.mark.slow),
        pytest.param(("psrl.engines.torch",), "engine replica 0", marks=pytest.mark.slow),
    ],
)
def test_a_killed_process_ends_the_run_with_its_name_and_nothing_stays(tmp_path, words, named):
    command = train(tmp_path, 500, "psrl.restarts.max_restarts=0")
    command.wait_for_step(1)
    command.descendant(*words).kill()
    began = time.monotonic()
    output = command.output(EXIT_LIMIT_S)
    assert time.monotonic() - began < EXIT_LIMIT_S
    assert command.process.returncode == 1
    assert named in output
    assert command.leftovers() == []


@pytest.mark.slow
def test_ctrl_c_saves_and_resume_gives_the_unbroken_run(tmp_path, unbroken):
    reference, _, _ = unbroken
    command = train(tmp_path, 4)
    command.wait_for_step(2)
    began = time.monotonic()
    command.interrupt()
    command.output(EXIT_LIMIT_S)
    assert time.monotonic() - began < EXIT_LIMIT_S
    assert command.process.returncode == 0, command.log()
    assert command.leftovers() == []
    done = max(command.metrics())
    assert done < 4
    resume_and_compare(tmp_path, reference)


def test_a_run_that_was_killed_goes_on_from_its_last_checkpoint(tmp_path, unbroken):
    reference, _, _ = unbroken
    command = train(tmp_path, 4, "trainer.save_freq=1", "psrl.restarts.max_restarts=0")
    command.wait_for_step(2)
    command.descendant("psrl.engines.torch").kill()
    command.output(EXIT_LIMIT_S)
    assert command.process.returncode == 1
    assert command.leftovers() == []
    resume_and_compare(tmp_path, reference)


@pytest.mark.slow
def test_sigterm_stops_as_ctrl_c_does(tmp_path):
    command = train(tmp_path, 500)
    command.wait_for_step(1)
    command.process.send_signal(signal.SIGTERM)
    output = command.output(EXIT_LIMIT_S)
    assert command.process.returncode == 0, output
    assert run_folder(tmp_path).has_checkpoint
    assert command.leftovers() == []
