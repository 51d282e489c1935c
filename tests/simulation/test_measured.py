"""A workload read from a run folder is what the run took, and playing it gives the run's own times back."""

import json
from datetime import datetime

import pytest
from simulation_kit import cluster

from psrl.errors import ConfigError
from psrl.simulation import measured_workload, simulate
from psrl.simulation.measured import Played, in_slots_share, mean_wait_s
from psrl.telemetry import names
from psrl.telemetry.names import TimeUse
from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.trajectories import TrajectoryWriter
from psrl.types import (
    Episode,
    EpisodeTicket,
    EpisodeUid,
    GroupUid,
    LoopResult,
    Outcome,
    PolicyVersion,
    Score,
    Step,
    Task,
    TaskUid,
    Timings,
    Trajectory,
    TrajectoryUid,
)


def episode(group, index, timings, *, turns=2):
    uid = EpisodeUid(f"{group}-e{index}")
    trajectory = Trajectory(uid=TrajectoryUid(f"{uid}-t0"))
    for turn in range(turns):
        step = Step(
            observation_ids=[1], sampled_ids=[2 + turn, 3, 4], logprobs=[-1.0] * 3, policy_versions=[0] * 3, temperature=1.0,
            finish_reason="stop",
        )  # fmt: skip
        trajectory.append(step)
    return Episode(
        ticket=EpisodeTicket(uid=uid, group=GroupUid(group), admitted_version=PolicyVersion(0), seed=1),
        task=Task(uid=TaskUid(group), prompt=(), data_source="test"),
        result=LoopResult(outcome=Outcome.FINISHED, trajectories=(trajectory,), messages=(), turn_texts=()),
        score=Score(reward=1.0, accuracy=1.0),
        timings=timings,
    )


@pytest.fixture
def run(tmp_path):
    """Four steps of two groups of two: 2 s of generation, 1 s of tools, 0.5 s of grading an episode; 8 s a step, of which 3 s train."""
    folder = RunFolder.create(tmp_path, "tiny", datetime(2026, 1, 1))
    writer = TrajectoryWriter(folder.trajectories)
    timings = Timings(total_s=3.5, generation_s=2.0, tools_s=1.0, reward_s=0.5)
    lines = []
    for step in range(1, 5):
        for group in range(2):
            for index in range(2):
                writer.write(episode(f"s{step}g{group}", index, timings), step=step)
        metrics = {
            names.STEP_SECONDS: 8.0,
            names.time_share(TimeUse.TRAINING): 3.0 / 8.0,
            names.time_share(TimeUse.IDLE): 0.25 / 8.0,
            names.SYNC_PUSH_SECONDS: 0.5,
            names.SYNC_PULL_SECONDS_MEAN: 0.75,
            names.SYNC_PAUSED_SECONDS_MAX: 0.5,
            names.SYNC_PAUSED_SECONDS_MEAN: 0.25,
            names.GROUPS_FILTERED_COUNT: 2.0,
            names.GROUPS_TRAINED_COUNT: 2.0,
            names.ERRORS_RETRIES_COUNT: 1.0,
        }
        lines.append(json.dumps({"step": step, "metrics": metrics}))
    writer.close()
    folder.metrics.write_text("\n".join(lines) + "\n")
    return folder.path


def test_seconds_and_shares_of_a_run_become_a_workload(run):
    workload = measured_workload(run)
    assert [part.mean() for part in (workload.train, workload.push, workload.rest, workload.sync, workload.pause)] == pytest.approx(
        [3.0, 0.5, 0.25, 0.75, 0.25]
    )
    # The first two steps are left out; the others have 2 filtered beside 2 trained groups, and one retry for 4 kept episodes.
    assert workload.equal_share == pytest.approx(0.5)
    assert workload.failures.episode_share == pytest.approx(1 / 5)
    assert len(workload.episodes.groups) == 4
    plan = workload.episodes.groups[0][0]
    assert (plan.work, plan.tools_s, plan.reward_s, plan.num_tokens) == ((1.0, 1.0), (1.0,), 0.5, (3.0, 3.0))


def test_the_time_that_turns_waited_for_a_slot_is_no_part_of_them():
    # 3 s with 8 running and 2 waiting, 1 s with 4 and 0: 28 of 34 turn seconds in slots.
    looks = [(3.0, 8.0, 2.0), (1.0, 4.0, 0.0)]
    steps = [
        {names.STEP_SECONDS: seconds, names.REPLICAS_RUNNING_MEAN: running, names.REPLICAS_WAITING_MEAN: waiting}
        for seconds, running, waiting in looks
    ]
    assert in_slots_share(steps) == pytest.approx(28 / 34)
    assert in_slots_share([{names.STEP_SECONDS: 1.0}]) == 1.0


def test_long_episodes_stay_long_when_their_turns_have_waited():
    # 2 turns each, 2 s and 8 s of generation, 70% of it in slots: 7 of 10 s. 0.75 s off each turn: 0.5 s and 6.5 s.
    episodes = [Played.of(episode("g", 0, Timings(total_s=total_s + 1, generation_s=total_s, tools_s=0.5))) for total_s in (2.0, 8.0)]
    wait_s = mean_wait_s(episodes, 0.7)
    assert wait_s == pytest.approx(0.75)
    plans = [each.plan(wait_s) for each in episodes]
    assert [sum(plan.work) for plan in plans] == pytest.approx([0.5, 6.5])
    assert [(plan.tools_s, plan.reward_s) for plan in plans] == [((0.5,), 0.5)] * 2
    assert mean_wait_s(episodes, 1.0) == pytest.approx(0.0, abs=1e-6)


def test_playing_a_run_again_gives_its_steps_back(run):
    # 3.5 s of episodes, 3 s of training, 0.5 s of push, and 0.75 s of sync, which goes on beside the 0.25 s of rest: 7.75 s.
    from dataclasses import replace

    from psrl.simulation import Failures

    workload = replace(measured_workload(run), failures=Failures())
    report = simulate(cluster(), workload, num_steps=12, num_warmup=2)
    assert report.step_s == pytest.approx(7.75)
    assert report.tokens_per_s == pytest.approx(4 * 6 / 7.75)


def test_syncs_of_a_run_that_let_turns_end_first_must_be_said(run):
    from psrl.cli.workload_options import WorkloadOptions, read_workload

    RunFolder(run).config.write_text("psrl: {partial_rollout: {enable: false}}\n")
    assert (measured_workload(run).sync.mean(), measured_workload(run).pause.mean()) == (0.0, 0.0)
    with pytest.raises(ConfigError, match="--sync and --pause"):
        read_workload(WorkloadOptions(sync="1"), run)
    said = read_workload(WorkloadOptions(sync="1", pause="0.5"), run)
    assert (said.sync.mean(), said.pause.mean(), said.train.mean()) == (1.0, 0.5, 3.0)


def test_a_folder_without_steps_is_refused(tmp_path):
    folder = RunFolder.create(tmp_path, "tiny", datetime(2026, 1, 1))
    with pytest.raises(ConfigError, match="no training episodes"):
        measured_workload(folder.path)
