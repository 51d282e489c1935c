"""A run whose driver is killed at random moments and resumed each time ends as one that was never disturbed.

Every run here is `psrl train` as a user starts it, with staleness 2, so that groups are in flight, have arrived and are being trained
on at any moment. Ten kills over three runs: some while one starts, most while it trains, validates or saves.
"""

import random
import time
from collections import Counter

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from psrl.runtime.recovery import checkpoints_in
from psrl.telemetry.group_log import Fate, check_group_log, read_group_log
from psrl.telemetry.json_lines import read_json_lines
from psrl.telemetry.names import REWARD_MEAN, VAL_SECONDS
from psrl.telemetry.run_folder import RunFolder
from tests.runtime.command import POLL_S, START_LIMIT_S, Command, start

NUM_STEPS, GROUPS_PER_STEP, ROLLOUT_N, STALENESS = 45, 4, 4, 2
TEST_FREQ = 9
STARTUP_S = 12.0
"""Most seconds after the command at which a starting run is killed."""
RUNNING_S = 3.0
"""Most seconds after a life's first step at which it is killed: some steps more."""
SETTINGS = (
    f"data.train_batch_size={GROUPS_PER_STEP}",
    f"psrl.rollout_n={ROLLOUT_N}",
    f"psrl.staleness={STALENESS}",
    f"trainer.total_training_steps={NUM_STEPS}",
    f"trainer.test_freq={TEST_FREQ}",
    "psrl.max_groups_in_flight=2",  # generation is what training waits for, so that checkpoints have groups in flight
    "trainer.save_freq=1",
    "trainer.trajectories_per_step=0",
    "data.generator.num_val=8",
    "train_actor_rollout_ref.rollout.n=1",
)
RUN_LIMIT_S = 400.0


def train(folder, *more: str) -> Command:
    return start(folder, "train", "retool_tiny", *SETTINGS, f"trainer.default_local_dir={folder}", *more)


def run_of(folder) -> RunFolder:
    (run,) = RunFolder.all(folder, "retool_tiny")
    return run


def trained_uids(run: RunFolder) -> set[str]:
    return {fate.uid for fate in read_group_log(run.groups) if fate.fate is Fate.TRAINED}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory) -> RunFolder:
    folder = tmp_path_factory.mktemp("unbroken")
    command = train(folder)
    output = command.output(RUN_LIMIT_S)
    assert command.process.returncode == 0, output
    return run_of(folder)


def wait_for_a_step(command: Command, printed_before: int) -> None:
    """Until this life has done a step, by what it prints."""
    deadline = time.monotonic() + START_LIMIT_S
    while "| reward" not in (command.folder / "output.txt").read_text()[printed_before:]:
        assert command.process.poll() is None, command.log()
        assert time.monotonic() < deadline, command.log()
        command.look()
        time.sleep(POLL_S)


def kill_at_a_random_moment(command: Command, draw: random.Random, printed_before: int, *, is_saved: bool) -> None:
    """kill -9 of the driver alone: nobody ends its processes for it."""
    if is_saved and draw.random() < 0.3:
        after_s = draw.uniform(0, STARTUP_S)
    else:
        wait_for_a_step(command, printed_before)
        after_s = draw.uniform(0, RUNNING_S)
    command.look()
    time.sleep(after_s)
    assert command.process.poll() is None, f"the run ended before it was killed: {command.log()}"
    command.look()
    command.process.kill()
    command.process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "num_kills"), [(1, 3), (2, 3), (3, 4)])
def test_a_run_that_was_killed_again_and_again_trains_on_what_an_unbroken_one_trains_on(tmp_path, unbroken, seed, num_kills):
    draw = random.Random(seed)
    commands, kills = [], []
    for _ in range(num_kills):
        printed = (tmp_path / "output.txt").stat().st_size if commands else 0
        is_saved = bool(commands) and run_of(tmp_path).has_checkpoint
        commands.append(train(tmp_path, *(["--resume"] if is_saved else [])))
        kill_at_a_random_moment(commands[-1], draw, printed, is_saved=is_saved)
        kills.append([path.name for path in checkpoints_in(run_of(tmp_path).checkpoints)][-1:])
    commands.append(train(tmp_path, "--resume"))
    output = commands[-1].output(RUN_LIMIT_S)
    assert commands[-1].process.returncode == 0, output
    print("newest checkpoint at each kill:", kills)
    print("resumes:", [(line["step"], line["num_arrived"], line["num_issued_again"]) for line in read_json_lines(run_of(tmp_path).resumes)])

    run = run_of(tmp_path)
    fates = read_group_log(run.groups)
    given = [fate.uid for fate in read_group_log(unbroken.groups)]
    assert check_group_log(fates, staleness=STALENESS, groups_per_step=GROUPS_PER_STEP, given=given) == []
    assert trained_uids(run) == trained_uids(unbroken)
    assert len(trained_uids(run)) == NUM_STEPS * GROUPS_PER_STEP
    check_record(run)
    assert [line for command in commands for line in command.leftovers()] == []


def check_record(run: RunFolder) -> None:
    """Every step, every validation and every episode stands in the run folder once."""
    lines = list(read_json_lines(run.metrics))
    assert Counter(line["step"] for line in lines if REWARD_MEAN in line["metrics"]) == Counter(range(1, NUM_STEPS + 1))
    validated = list(range(0, NUM_STEPS + 1, TEST_FREQ))
    assert Counter(line["step"] for line in lines if VAL_SECONDS in line["metrics"]) == Counter(validated)
    events = EventAccumulator(str(run.tensorboard), purge_orphaned_data=True, size_guidance={"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars(REWARD_MEAN)] == list(range(1, NUM_STEPS + 1))
    episodes = Counter(line["uid"] for line in read_json_lines(run.trajectories / "train.jsonl"))
    assert set(episodes.values()) == {1}
    assert len(episodes) == NUM_STEPS * GROUPS_PER_STEP * ROLLOUT_N
    validations = Counter((line["step"], line["uid"]) for line in read_json_lines(run.trajectories / "val.jsonl"))
    assert set(validations.values()) == {1}
