"""The whole way through all real parts: play and store, stop and go on, grade again, train on what is stored."""

import time

import pytest
from runtime.command import POLL_S, START_LIMIT_S, start

from psrl.telemetry.metric_log import read_metrics
from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.trajectories import read_trajectories

pytestmark = pytest.mark.slow

NUM_TASKS, ROLLOUT_N = 32, 4
SMALL = (f"psrl.rollout_n={ROLLOUT_N}", "trainer.logger=[console,jsonl]")
LIMIT_S = 400.0


def ended(command):
    output = command.output(LIMIT_S)
    assert command.process.returncode == 0, output
    assert command.leftovers() == []
    return output


def latest(folder):
    found = RunFolder.latest(folder, "retool_tiny")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A rollout that Ctrl-C stopped in its middle and that was gone on with."""
    folder = tmp_path_factory.mktemp("rollout")
    words = ("rollout", "retool_tiny", *SMALL, f"data.train_max_samples={NUM_TASKS}", f"trainer.default_local_dir={folder}")
    # Few at once, so that there is a middle.
    command = start(folder, *words, "gen_actor_rollout_ref.rollout.agent.max_concurrent_episodes=2")
    deadline = time.monotonic() + START_LIMIT_S
    while not any(path.stat().st_size for path in folder.glob("retool_tiny/*/trajectories/train.jsonl")):
        assert time.monotonic() < deadline and command.process.poll() is None, command.log()
        command.look()
        time.sleep(POLL_S)
    command.interrupt()
    ended(command)
    first = [record.episode.ticket.uid for record in read_trajectories(latest(folder).trajectories / "train.jsonl")]
    assert 0 < len(first) < NUM_TASKS * ROLLOUT_N
    ended(start(folder, "rollout", "retool_tiny", "--resume", f"trainer.default_local_dir={folder}"))
    return latest(folder), first


def test_every_episode_is_stored_once_and_what_was_stored_is_not_played_again(stored):
    run, first = stored
    uids = [record.episode.ticket.uid for record in read_trajectories(run.trajectories / "train.jsonl")]
    assert sorted(uids) == sorted(f"train-0-{row}-e{index}" for row in range(NUM_TASKS) for index in range(ROLLOUT_N))
    assert uids[: len(first)] == first
    assert max(read_metrics(run.metrics)) == NUM_TASKS * ROLLOUT_N


def test_grading_again_by_the_same_rules_changes_nothing_and_its_file_is_trained_on_and_resumed(stored, tmp_path):
    run, _ = stored
    assert "0 changed" in ended(start(tmp_path, "regrade", str(run.path)))
    regraded = run.trajectories / "train.regraded-1.jsonl"
    settings = (*SMALL, "data.train_batch_size=8", "data.generator.num_val=8", "train_actor_rollout_ref.rollout.n=1", "trainer.test_freq=0")
    where = f"trainer.default_local_dir={tmp_path}"
    words = ("train", "retool_tiny", "--from-trajectories", str(regraded), *settings, where, "trainer.total_training_steps=40")
    command = start(tmp_path, *words)
    command.wait_for_step(2)
    command.interrupt()
    ended(command)
    done = max(command.metrics())
    resumed = start(tmp_path, "train", "retool_tiny", "--resume", where, f"trainer.total_training_steps={done + 2}")
    ended(resumed)
    metrics = resumed.metrics()
    assert max(metrics) == done + 2
    # Nothing was played: the first step's tokens are of the very weights that it starts with.
    assert metrics[1]["train/logprob_gap/max"] < 1e-4
    assert metrics[2]["mismatch/version_gap/mean"] == 1.0
    trained = [line for line in (latest(tmp_path).groups).read_text().splitlines() if '"trained"' in line]
    assert len(trained) == 8 * (done + 2)
