"""Metrics: names, values that are not finite, resumes, and what each tracker writes."""

import math
import subprocess
import sys
from datetime import datetime

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from psrl.errors import ConfigError
from psrl.telemetry import names
from psrl.telemetry.metric_log import curve, read_metrics
from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.trackers import TrackedRun, open_metric_log, trackers
from psrl.telemetry.val_accuracy import mean_at_n, pass_at


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path, "gsm8k", datetime(2026, 3, 4, 5, 6, 7))


def log_steps(folder, tracker, rewards, resumed_from=None):
    log = open_metric_log([tracker], TrackedRun(folder=folder, resumed_from=resumed_from))
    for step, reward in rewards.items():
        log.log({names.REWARD_MEAN: reward}, step=step)
    log.close()


def tensorboard_curve(folder, name):
    events = EventAccumulator(str(folder.tensorboard), purge_orphaned_data=True)
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_jsonl_gives_back_what_was_logged_and_merges_the_calls_of_one_step(folder):
    log = open_metric_log(["jsonl"], TrackedRun(folder=folder))
    log.log({names.REWARD_MEAN: 0.25, names.STEP_SECONDS: 4.5}, step=1)
    log.log({names.VAL_GREEDY_ACCURACY: 0.5}, step=1)
    log.close()
    assert read_metrics(folder.metrics) == {1: {names.REWARD_MEAN: 0.25, names.STEP_SECONDS: 4.5, names.VAL_GREEDY_ACCURACY: 0.5}}


def test_a_resumed_run_goes_on_with_the_file_and_each_step_stands_there_once(folder):
    log_steps(folder, "jsonl", {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4})
    folder.cut(2, {})
    log_steps(folder, "jsonl", {3: 0.9}, resumed_from=2)
    assert curve(read_metrics(folder.metrics), names.REWARD_MEAN) == [(1, 0.1), (2, 0.2), (3, 0.9)]
    assert len(folder.metrics.read_text().splitlines()) == 3


def test_half_a_line_that_a_crash_left_is_passed_over_and_removed_by_the_next_writer(folder):
    log_steps(folder, "jsonl", {1: 0.1, 2: 0.2})
    with folder.metrics.open("ab") as file:
        file.write(b'{"step": 3, "metr')
    assert list(read_metrics(folder.metrics)) == [1, 2]
    log_steps(folder, "jsonl", {3: 0.3}, resumed_from=2)
    assert list(read_metrics(folder.metrics)) == [1, 2, 3]


def test_a_line_broken_in_the_middle_of_the_file_is_an_error_that_names_it(folder):
    folder.metrics.write_text('{"step": 1, "metrics": {}}\n{"step": 2, "me\n{"step": 3, "metrics": {}}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl line 2 is not JSON"):
        read_metrics(folder.metrics)


def test_tensorboards_own_reader_reads_the_scalars_back(folder):
    log_steps(folder, "tensorboard", {1: 0.25, 2: 0.5})
    assert tensorboard_curve(folder, names.REWARD_MEAN) == [(1, 0.25), (2, 0.5)]


def test_tensorboards_own_reader_drops_what_a_resume_rolled_back(folder):
    log_steps(folder, "tensorboard", {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0})
    log_steps(folder, "tensorboard", {3: -0.5}, resumed_from=2)
    assert tensorboard_curve(folder, names.REWARD_MEAN) == [(1, 0.25), (2, 0.5), (3, -0.5)]


def test_the_tensorboard_tracker_imports_neither_torch_nor_tensorflow(folder):
    program = (
        "import sys; from pathlib import Path; from psrl.telemetry.run_folder import RunFolder\n"
        "from psrl.telemetry.trackers import TrackedRun, open_metric_log\n"
        f"open_metric_log(['tensorboard'], TrackedRun(folder=RunFolder(Path({str(folder.path)!r})))).close()\n"
        "print(sorted({'torch', 'tensorflow', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_the_console_writes_one_line_that_tells_the_step(folder):
    lines = []
    log = open_metric_log(["console"], TrackedRun(folder=folder, write=lines.append))
    shares = {use: 0.0 for use in names.TimeUse} | {names.TimeUse.GENERATION: 0.61, names.TimeUse.TRAINING: 0.39}
    log.log(
        {
            names.REWARD_MEAN: 0.43,
            names.ACCURACY_MEAN: 0.715,
            names.TOOL_RATE: 0.93,
            names.TURNS_MEAN: 1.9,
            names.GENERATION_TOKENS_PER_SECOND: 3140.0,
            names.STEP_SECONDS: 4.2,
            **{names.time_share(use): share for use, share in shares.items()},
        },
        step=12,
    )
    log.log({names.VAL_GREEDY_ACCURACY: 0.97, names.VAL_MEAN_AT_N_ACCURACY: 0.952}, step=12)
    passed = {pass_at(2): 0.96, pass_at(16): 0.98, pass_at(4): 0.97}
    by_source = {mean_at_n("aime_2024"): 0.5, pass_at(16, "aime_2024"): 0.6, mean_at_n("openai/gsm8k"): 0.99}
    log.log({names.VAL_MEAN_AT_N_ACCURACY: 0.952, **passed, **by_source}, step=13)
    log.log({names.TRAIN_LOSS: 0.1}, step=12)
    log.close()
    assert lines == [
        "step  12 | reward +0.430 | acc 71.5% | tool 93% | turns 1.90 | 3.1k tok/s | 4.20 s: gen 61% train 39%",
        "step  12 | validation | greedy 97.0% | mean@n 95.2%",
        "step  13 | validation | mean@n 95.2% | pass@16 98.0% | aime_2024 mean@n 50.0% | openai.gsm8k mean@n 99.0%",
    ]


def test_what_is_not_finite_is_left_out_and_counted(folder):
    log = open_metric_log(["jsonl", "tensorboard"], TrackedRun(folder=folder))
    log.log({names.TRAIN_LOSS: math.nan, names.TRAIN_GRAD_NORM: math.inf, names.TRAIN_LR: 1e-6}, step=1)
    log.close()
    assert read_metrics(folder.metrics) == {1: {names.TRAIN_LR: 1e-6, names.ERRORS_NOT_FINITE_COUNT: 2.0}}
    assert tensorboard_curve(folder, names.ERRORS_NOT_FINITE_COUNT) == [(1, 2.0)]


@pytest.mark.parametrize("name", ["reward", "reward/mean", "Reward/episode/mean", "a/b/c/d", "a//c", "", "a/b c/d"])
def test_a_name_that_is_not_area_noun_stat_is_a_mistake(folder, name):
    log = open_metric_log(["jsonl"], TrackedRun(folder=folder))
    with pytest.raises(AssertionError, match="area/noun/stat"):
        log.log({name: 1.0}, step=1)
    log.close()


def test_every_name_that_psrl_logs_is_a_metric_name_and_is_given_once():
    constants = [value for key, value in vars(names).items() if key.isupper() and not key.startswith("_")]
    assert len(constants) == len(set(constants)) >= 28
    assert [name for name in constants if not names.is_metric_name(name)] == []
    assert all(names.is_metric_name(names.outcome_share(outcome)) for outcome in names.Outcome)


def test_whatever_an_environment_calls_a_number_becomes_a_metric_name():
    assert names.said_metric("env", "board size (cm)") == "env/board_size_cm"
    for hostile in ("", "///", "ключ", "a\nb", "score/part"):
        assert names.is_metric_name(names.said_metric("agent", hostile))


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_an_optional_tracker_that_is_not_installed_names_the_line_to_run(folder, name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)  # what Python itself does for "cannot be imported"
    with pytest.raises(ConfigError, match=rf"trainer.logger='{name}'.*pip install psrl\[{name}\]"):
        open_metric_log([name], TrackedRun(folder=folder))


def test_an_unknown_tracker_lists_the_known_ones(folder):
    with pytest.raises(ConfigError, match="console, jsonl, tensorboard, trackio, wandb"):
        open_metric_log(["tensorbord"], TrackedRun(folder=folder))
    assert trackers.names == ("console", "jsonl", "tensorboard", "trackio", "wandb")
