"""Generation and training side by side, with all real parts: nothing older than the bound, nothing lost, nothing trained on twice."""

from psrl.telemetry.errors_log import read_errors
from psrl.telemetry.group_log import Fate, check_group_log, read_group_log
from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.trajectories import read_trajectories
from tests.runtime.command import start

STEPS, GROUPS, STALENESS = 8, 4, 2
SETTINGS = (
    f"psrl.staleness={STALENESS}",
    "psrl.redundant_groups=1",
    "psrl.redundant_episodes=1",
    "psrl.partial_rollout.interrupt_as_prompt=true",
    "gen_actor_rollout_ref.rollout.num_replicas=2",
    "data.generator.num_val=8",
    f"data.train_batch_size={GROUPS}",
    "psrl.rollout_n=4",
    "train_actor_rollout_ref.rollout.n=1",
    "trainer.test_freq=3",
    "trainer.trajectories_per_step=0",
    f"trainer.total_training_steps={STEPS}",
)


def test_a_run_with_staleness_keeps_the_bound_and_gives_every_group_one_fate(tmp_path):
    command = start(tmp_path, "train", "retool_tiny", *SETTINGS, f"trainer.default_local_dir={tmp_path}")
    output = command.output(300)
    assert command.process.returncode == 0, output
    assert command.leftovers() == []
    assert "Task was destroyed" not in output
    run = RunFolder.latest(tmp_path, "retool_tiny")
    assert list(read_errors(run.errors)) == []

    fates = read_group_log(run.groups)
    assert check_group_log(fates, staleness=STALENESS, groups_per_step=GROUPS) == []
    trained = {fate.uid: fate for fate in fates if fate.fate is Fate.TRAINED}
    assert len(trained) == STEPS * GROUPS

    metrics = command.metrics()
    assert max(metrics[step]["staleness/version_gap/max"] for step in range(1, STEPS + 1)) >= 1, "it never ran ahead"
    # A validation is of its step's weights alone, however far training has gone on meanwhile.
    for record in read_trajectories(run.trajectories / "val.jsonl"):
        versions = {version for trajectory in record.episode.result.trajectories for version in trajectory.versions() if version >= 0}
        assert versions == {record.step}
    assert {step for step, values in metrics.items() if "val/greedy/accuracy" in values} == {0, 3, 6, 8}

    for record in read_trajectories(run.trajectories / "train.jsonl"):
        fate = trained.get(record.episode.ticket.group)
        if fate is None:
            continue
        versions = [version for trajectory in record.episode.result.trajectories for version in trajectory.versions() if version >= 0]
        assert fate.buffer_version - STALENESS <= min(versions), record.episode.ticket.uid
        assert max(versions) <= fate.buffer_version
        assert versions == sorted(versions), "a token of older weights after one of newer ones"
