"""`psrl regrade`: new rewards of stored episodes in a new file; what is stored stays, and a grader that hangs costs one reward."""

import json
import os
import signal
import threading
import time
from dataclasses import replace

import pytest
from runtime.stored_kit import episode_of, run_folder, train_file

from psrl.cli.main import main
from psrl.cli.regrade import print_changes
from psrl.runtime.score_changes import ScoreChanges
from psrl.telemetry.errors_log import read_errors
from psrl.telemetry.trajectories import read_trajectories
from psrl.types import Outcome, Score

OF_ENVIRONMENT = "reward: {name: environment}"


def regrade(path, *overrides):
    """Exit code."""
    with pytest.raises(SystemExit) as info:
        main(["regrade", str(path), *overrides])
    return info.value.code


def rows_of(path):
    return [record.episode for record in read_trajectories(path)]


def custom(tmp_path, body):
    """Settings of a reward function with this body."""
    file = tmp_path / "mine.py"
    file.write_text(f"import time\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n{body}\n")
    return (f"custom_reward_function.path={file}", "reward.name=custom", "reward.timeout_s=1.5")


def test_names_that_rows_chose_are_printed_as_they_are(tmp_path, capsys):
    told = episode_of("a", 0, reward=1.0)
    changes = ScoreChanges()
    before = replace(told, task=replace(told.task, data_source="math[/b]"), score=Score(reward=0.0))
    changes.add(before, told)
    print_changes(changes)
    assert "math[/b]" in capsys.readouterr().out


def test_new_rewards_lie_beside_the_old_ones_and_all_else_is_the_same(tmp_path, capsys):
    told = [episode_of("a", 0, reward=1.0), episode_of("a", 1, reward=0.5), episode_of("b", 0, reward=0.0)]
    told.append(episode_of("b", 1, reward=None, outcome=Outcome.INFRA_ERROR, error="engine gone", step_rewards=()))
    stored = [replace(told[0], score=Score(reward=-1.0, accuracy=0.0)), told[1], replace(told[2], score=Score(reward=None)), told[3]]
    run = run_folder(tmp_path / "run", stored, OF_ENVIRONMENT)
    before = train_file(run).read_bytes()
    assert regrade(run.path) == 0
    printed = capsys.readouterr().out
    assert train_file(run).read_bytes() == before
    new = rows_of(run.trajectories / "train.regraded-1.jsonl")
    assert [episode.score.reward for episode in new] == [1.0, 0.5, 0.0, None]
    assert [replace(episode, score=Score(reward=None)) for episode in new] == [
        replace(episode, score=Score(reward=None)) for episode in rows_of(train_file(run))
    ]
    (row,) = [line.split() for line in printed.splitlines() if line.strip().startswith("sums")]
    # Means of those with a reward: (-1 + 0.5) / 2 before, (1 + 0.5 + 0) / 3 after; one up, one that was not judged before.
    assert row == ["sums", "4", "-0.25", "->", "0.5", "0.5", "->", "0.667", "1", "0", "1", "0"]
    assert "a-e0" in printed and "a-e1" not in printed
    assert regrade(train_file(run)) == 0
    assert regrade(run.trajectories / "train.regraded-1.jsonl") == 0
    assert {path.name for path in run.trajectories.glob("*.jsonl") if "errors" not in path.name} == {
        "train.jsonl", "train.regraded-1.jsonl", "train.regraded-2.jsonl", "train.regraded-3.jsonl"
    }  # fmt: skip


def test_a_grader_that_hangs_is_killed_and_costs_one_reward(tmp_path):
    run = run_folder(tmp_path / "run", [episode_of("a", index, reward=float(index)) for index in range(3)], OF_ENVIRONMENT)
    assert regrade(run.path, *custom(tmp_path, "    while '1.0' in solution_str: pass\n    return 0.25")) == 0
    new = rows_of(run.trajectories / "train.regraded-1.jsonl")
    assert [episode.score.reward for episode in new] == [0.25, None, 0.25]
    assert "gave no answer within 1.5 s and was killed" in new[1].result.error
    (error,) = read_errors(run.trajectories / "train.regraded-1.errors.jsonl")
    assert error.unit == "a-e1"
    # What the old grader's failure had left is gone where the new one works.
    assert regrade(run.trajectories / "train.regraded-1.jsonl") == 0
    assert rows_of(run.trajectories / "train.regraded-2.jsonl") == rows_of(train_file(run))


def test_a_grader_that_fails_on_most_ends_with_the_cause(tmp_path, capsys):
    run = run_folder(tmp_path / "run", [episode_of("a", index) for index in range(70)], OF_ENVIRONMENT)
    assert regrade(run.path, *custom(tmp_path, "    raise ValueError('no such unit')")) == 1
    said = capsys.readouterr().err
    assert "100% of the last 64 episodes could not be judged" in said and "no such unit" in said
    assert [path.name for path in run.trajectories.glob("*regraded-1.jsonl*")] == ["train.regraded-1.jsonl.unfinished"]


def test_ctrl_c_keeps_what_is_graded(tmp_path, capsys):
    run = run_folder(tmp_path / "run", [episode_of("a", index, reward=float(index)) for index in range(300)], OF_ENVIRONMENT)
    unfinished = run.trajectories / "train.regraded-1.jsonl.unfinished"

    def interrupt():
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not (unfinished.exists() and unfinished.stat().st_size):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    code = regrade(run.path, *custom(tmp_path, "    time.sleep(0.1)\n    return 1.0"))
    watcher.join()
    assert code == 0
    kept = rows_of(run.trajectories / "train.regraded-1.jsonl")
    assert 0 < len(kept) < 300
    assert [episode.ticket.uid for episode in kept] == [f"a-e{index}" for index in range(len(kept))]
    assert not unfinished.exists()
    assert ["stopped", "early", "True"] in [line.split() for line in capsys.readouterr().out.splitlines()]


def test_what_cannot_be_graded_is_named(tmp_path, capsys):
    run = run_folder(tmp_path / "run", [episode_of("a", 0)], OF_ENVIRONMENT)
    (tmp_path / "empty" / "trajectories").mkdir(parents=True)
    without = json.loads(train_file(run).read_text())
    del without["ground_truth"]
    (run.trajectories / "old.jsonl").write_text(json.dumps(without) + "\n")
    (run.trajectories / "cut.jsonl").write_text('{"step": 1}\nnothing\n')
    (run.trajectories / "none.jsonl").write_text("")
    for path, words in (
        (tmp_path / "nowhere", "there is no such file or folder"),
        (tmp_path / "empty", "no training episode was kept"),
        (run.trajectories / "old.jsonl", "line 1 has no field 'ground_truth'"),
        (run.trajectories / "cut.jsonl", "line 1 has no field 'uid'"),
        (run.trajectories / "none.jsonl", "holds no episode"),
    ):
        assert regrade(path) == 2, path
        assert words in " ".join(capsys.readouterr().err.split()), path
    assert regrade(run.path, "reward.name=retol") == 2
    assert "did you mean retool?" in capsys.readouterr().err
    assert [path.name for path in run.trajectories.glob("*regraded*")] == []
