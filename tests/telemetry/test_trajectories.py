"""Episodes on disk: back exactly, whatever the policy wrote, whatever cut the file."""

import dataclasses

import orjson
import pytest

from psrl.errors import ConfigError
from psrl.telemetry.trajectories import TrajectoryWriter, read_trajectories
from psrl.types import Outcome, Submission


def written(folder, *episodes, pieces=()):
    writer = TrajectoryWriter(folder)
    for step, episode in enumerate(episodes, start=1):
        writer.write(episode, step=step, pieces=pieces)
    writer.close()


def test_an_episode_comes_back_with_all_that_grading_and_training_need(tmp_path, episode_of):
    episode = episode_of()
    written(tmp_path, episode)
    (record,) = read_trajectories(tmp_path / "train.jsonl")
    assert record.step == 1
    read = record.episode
    for part in ("ticket", "task", "score", "timings"):
        assert getattr(read, part) == getattr(episode, part)
    assert dataclasses.replace(read.result, trajectories=()) == dataclasses.replace(episode.result, trajectories=())
    (trajectory,) = read.result.trajectories
    assert trajectory.uid == "train-0-000001-e0-t0"
    assert trajectory.ids() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert trajectory.loss_mask() == [0, 0, 0, 1, 1, 0, 1, 1, 1]
    assert trajectory.versions() == [-1, -1, -1, 7, 7, -1, 8, 8, 8]
    assert trajectory.turn_indices() == [-1, -1, -1, 0, 0, -1, 1, 1, 1]
    assert trajectory.logprobs() == [0, 0, 0, -0.123456789, -0.123456789, 0, -0.123456789, -0.123456789, -0.123456789]
    assert trajectory.temperature == 1.0


def test_the_line_holds_flat_columns_that_other_programs_can_read(tmp_path, episode_of):
    written(tmp_path, episode_of())
    line = orjson.loads((tmp_path / "train.jsonl").read_bytes())
    assert line["uid"] == "train-0-000001-e0"
    assert line["group"] == "train-0-000001"
    assert line["agent"] == "multi_turn_agent"
    (trajectory,) = line["trajectories"]
    assert {len(trajectory[name]) for name in ("ids", "loss_mask", "logprobs", "versions")} == {9}


def test_a_mask_that_the_turns_do_not_say_is_refused_and_not_passed_over(tmp_path, episode_of):
    written(tmp_path, episode_of())
    line = orjson.loads((tmp_path / "train.jsonl").read_bytes())
    line["trajectories"][0]["loss_mask"][3] = 0
    (tmp_path / "train.jsonl").write_bytes(orjson.dumps(line) + b"\n")
    with pytest.raises(ConfigError, match=r"line 1 .*loss_mask of train-0-000001-e0-t0 is another than its turns say"):
        list(read_trajectories(tmp_path / "train.jsonl"))


def test_validation_episodes_lie_in_a_file_of_their_own(tmp_path, episode_of):
    written(tmp_path, episode_of(), episode_of("val-0-000001", is_validation=True))
    assert [record.episode.task.uid for record in read_trajectories(tmp_path / "train.jsonl")] == ["train-0-000001"]
    assert [record.episode.task.uid for record in read_trajectories(tmp_path / "val.jsonl")] == ["val-0-000001"]


@pytest.mark.parametrize("value", ["\ud800 lone", "\x00\x1b[2J", "\u2028\n\r", 10**100, -(2**63) - 1, {"a": [None, True]}, 1.5e300])
def test_whatever_a_policy_writes_into_a_call_comes_back(tmp_path, episode_of, value):
    written(tmp_path, episode_of(arguments={"code": value}), episode_of())
    first, second = read_trajectories(tmp_path / "train.jsonl")
    assert first.episode.result.messages[2].tool_calls[0].arguments == {"code": value}
    assert second.step == 2


@pytest.mark.parametrize("text", ["", "diff --git a/x b/x\n", "\ud800 lone", "\x00\x1b[2J\r\n\ufffd"])
def test_what_an_agent_handed_in_comes_back(tmp_path, episode_of, text):
    submission = Submission(exit_status="LimitsExceeded", patch=text, text=text)
    written(tmp_path, episode_of(submission=submission), episode_of())
    first, second = read_trajectories(tmp_path / "train.jsonl")
    assert (first.episode.result.submission, second.episode.result.submission) == (submission, None)
    assert not first.episode.result.submission.is_submitted


def test_an_episode_without_reward_and_tokens_is_kept_too(tmp_path, episode_of):
    failed = episode_of(reward=None, accuracy=None, outcome=Outcome.INFRA_ERROR, trajectories=(), error="engine gone")
    written(tmp_path, failed)
    (record,) = read_trajectories(tmp_path / "train.jsonl")
    assert record.episode == failed


def test_pieces_are_kept_beside_their_tokens(tmp_path, episode_of):
    texts = ["<s>", "2", "+", "a", "b", "c", "d", "e", "</s>"]
    written(tmp_path, episode_of(), pieces=[texts])
    (record,) = read_trajectories(tmp_path / "train.jsonl")
    assert record.pieces == (tuple(texts),)
    with pytest.raises(AssertionError, match="2 pieces for 9 tokens"):
        written(tmp_path, episode_of(), pieces=[["a", "b"]])


@pytest.mark.parametrize("kept", [1, 100, -2])
def test_a_last_line_cut_anywhere_is_passed_over_and_the_next_writer_goes_on_cleanly(tmp_path, episode_of, kept):
    path = tmp_path / "train.jsonl"
    written(tmp_path, episode_of())
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:kept])
    assert [record.step for record in read_trajectories(path)] == [1]
    written(tmp_path, episode_of("train-0-000002"))
    assert [record.episode.task.uid for record in read_trajectories(path)] == ["train-0-000001", "train-0-000002"]


def test_a_file_that_holds_nothing_but_half_a_line_is_begun_again(tmp_path, episode_of):
    path = tmp_path / "train.jsonl"
    path.write_bytes(b'{"step": 1, "uid": "' + b"x" * 200_000)
    assert list(read_trajectories(path)) == []
    written(tmp_path, episode_of())
    assert [record.step for record in read_trajectories(path)] == [1]
