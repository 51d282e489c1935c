"""One contract suite for every data plane, TransferQueue's real one included."""

import asyncio
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch

from psrl.config.transfer_queue import TransferQueueConfig
from psrl.data_plane import COLUMN_NAMES, MemoryDataPlane, rows_of
from psrl.data_plane.transfer_queue import TransferQueueDataPlane
from psrl.errors import DataPlaneError
from psrl.types import Episode, EpisodeTicket, LoopResult, Outcome, Score, Step, Task, Timings, Trajectory


@pytest.fixture(scope="module")
def transfer_queue_plane():
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    plane = TransferQueueDataPlane(deadline_s=60.0, startup_deadline_s=120.0)
    plane.start(TransferQueueConfig())
    yield plane
    plane.close()
    ray.shutdown()


@pytest.fixture(params=["memory", "transfer_queue"])
def plane(request):
    plane = MemoryDataPlane() if request.param == "memory" else request.getfixturevalue("transfer_queue_plane")
    yield plane
    plane.clear(plane.keys())


def episode(uid: str, *, reward: float | None, steps: list[tuple[list[int], list[int]]]) -> Episode:
    trajectory = Trajectory(uid=f"{uid}-t0")
    for observed, sampled in steps:
        trajectory.append(
            Step(
                observation_ids=observed,
                sampled_ids=sampled,
                logprobs=[-0.5] * len(sampled),
                policy_versions=[3] * len(sampled),
                temperature=1.0,
                finish_reason="stop",
            )
        )
    return Episode(
        ticket=EpisodeTicket(uid=uid, group="g", admitted_version=3, seed=1),
        task=Task(uid="g", prompt=(), data_source="test"),
        result=LoopResult(outcome=Outcome.FINISHED, trajectories=(trajectory,), messages=(), turn_texts=()),
        score=Score(reward=reward),
        timings=Timings(),
    )


LONG = episode("a", reward=1.0, steps=[([1, 2], [3]), ([4], [5, 6])])
SHORT = episode("b", reward=-1.0, steps=[([7], [8])])


def test_rows_come_back_in_the_order_asked_for_with_their_own_lengths(plane):
    meta = plane.put([*rows_of(LONG), *rows_of(SHORT)])
    assert meta.keys == ["a-t0", "b-t0"]
    first, second = plane.fetch(["b-t0", "a-t0"], ["input_ids", "loss_mask"])
    assert first["input_ids"].tolist() == [7, 8]
    assert second["input_ids"].tolist() == [1, 2, 3, 4, 5, 6]
    assert second["loss_mask"].tolist() == [0, 0, 1, 0, 1, 1]
    assert set(first) == {"input_ids", "loss_mask"}


def test_every_column_keeps_its_dtype_and_values(plane):
    plane.put(rows_of(LONG))
    (row,) = plane.fetch(["a-t0"], COLUMN_NAMES)
    assert {name: str(row[name].dtype) for name in row} == {
        "input_ids": "torch.int64",
        "loss_mask": "torch.int8",
        "rollout_logprobs": "torch.float32",
        "policy_versions": "torch.int64",
        "turn_indices": "torch.int32",
        "rewards": "torch.float32",
    }
    assert row["rollout_logprobs"].tolist() == [0.0, 0.0, -0.5, 0.0, -0.5, -0.5]
    assert row["policy_versions"].tolist() == [-1, -1, 3, -1, 3, 3]
    assert row["turn_indices"].tolist() == [-1, -1, 0, -1, 1, 1]


@pytest.mark.parametrize(
    ("step_rewards", "expected"),
    [
        ((), [0, 0, 0, 0, 0, 1.0]),  # a scorer judged the whole
        ((0.25, 0.75), [0, 0, 0.25, 0, 0, 0.75]),
        ((0.25, None), [0, 0, 0.25, 0, 0, 0.75]),  # the rest of the reward came with the end
        ((2.0,), [0, 0, 2.0, 0, 0, -1.0]),  # the last turn was cut, and the episode punished
    ],
)
def test_rewards_stand_where_they_were_earned_and_sum_to_the_episodes(plane, step_rewards, expected):
    judged = dataclasses.replace(LONG, result=dataclasses.replace(LONG.result, step_rewards=step_rewards))
    plane.put(rows_of(judged))
    (row,) = plane.fetch(["a-t0"], ["rewards"])
    assert row["rewards"].tolist() == expected


def test_tags_travel_with_the_keys(plane):
    meta = plane.put(rows_of(LONG))
    assert meta.tags[0] == {
        "group": "g",
        "episode": "a",
        "reward": 1.0,
        "outcome": "finished",
        "admitted_version": 3,
        "oldest_version": 3,
        "num_tokens": 6,
        "num_sampled": 3,
        "num_turns": 2,
        "temperature": 1.0,
    }


def test_cleared_keys_are_gone_and_clearing_twice_is_harmless(plane):
    plane.put([*rows_of(LONG), *rows_of(SHORT)])
    plane.clear(["a-t0"])
    plane.clear(["a-t0"])
    assert plane.keys() == ["b-t0"]
    with pytest.raises(DataPlaneError, match="a-t0"):
        plane.fetch(["a-t0"], ["input_ids"])


def test_a_key_that_is_put_again_gets_the_new_row(plane):
    plane.put(rows_of(LONG))
    plane.put(rows_of(episode("a", reward=0.5, steps=[([9], [9, 9])])))
    assert plane.keys() == ["a-t0"]
    assert plane.fetch(["a-t0"], ["input_ids"])[0]["input_ids"].tolist() == [9, 9, 9]


def test_an_episode_without_reward_makes_no_row():
    assert rows_of(episode("c", reward=None, steps=[([1], [2])])) == []


def test_a_thousand_ragged_rows_pass(plane):
    rows = [row for i in range(1000) for row in rows_of(episode(f"e{i}", reward=0.0, steps=[(list(range(i % 50 + 1)), [1, 2])]))]
    meta = plane.put(rows)
    fetched = plane.fetch(meta.keys, ["input_ids"])
    assert [len(row["input_ids"]) for row in fetched] == [i % 50 + 3 for i in range(1000)]
    assert torch.equal(fetched[999]["input_ids"], torch.tensor([*range(50), 1, 2]))


def test_every_branch_of_an_episode_is_a_row_of_its_own_that_shares_group_and_reward(plane):
    whole = episode("a", reward=0.5, steps=[([1, 2], [3]), ([4], [5])])
    other = Trajectory(uid="a-t1")
    other.append(
        # What the branches share was trained on in the first one: here it is context.
        Step(observation_ids=[1, 2, 3, 9], sampled_ids=[6], logprobs=[-1.0], policy_versions=[4], temperature=1.0, finish_reason="stop")
    )
    empty = Trajectory(uid="a-t2")
    branched = dataclasses.replace(whole, result=dataclasses.replace(whole.result, trajectories=(*whole.result.trajectories, other, empty)))
    meta = plane.put(rows_of(branched))
    assert meta.keys == ["a-t0", "a-t1"], "a branch in which nothing was sampled is no row"
    assert [(tags["episode"], tags["group"], tags["reward"]) for tags in meta.tags] == [("a", "g", 0.5)] * 2
    _, second = plane.fetch(meta.keys, COLUMN_NAMES)
    assert second["input_ids"].tolist() == [1, 2, 3, 9, 6]
    assert second["loss_mask"].tolist() == [0, 0, 0, 0, 1]
    assert second["policy_versions"].tolist() == [-1, -1, -1, -1, 4]


@pytest.mark.usefixtures("transfer_queue_plane")
def test_calls_that_nobody_answers_fail_at_once_when_the_run_gives_up():
    leaving = TransferQueueDataPlane(deadline_s=60.0, startup_deadline_s=120.0)
    leaving.connect()
    begun, ended = threading.Event(), threading.Event()

    async def call() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(leaving._ended, "clear of 3 rows", call())
        assert begun.wait(60)
        leaving.give_up()
        with pytest.raises(DataPlaneError, match="clear of 3 rows was given up"):
            waiting.result(10)
        assert ended.wait(10), "nothing waits on for an answer that nobody wants"
    with pytest.raises(DataPlaneError, match="list was given up"):
        leaving.keys()
    leaving.close()


def test_a_call_that_takes_too_long_is_named_and_ended():
    plane = TransferQueueDataPlane(deadline_s=0.05, startup_deadline_s=120.0)
    ended = threading.Event()

    async def call() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    with pytest.raises(DataPlaneError, match=r"put of 3 rows did not end within 0\.05 s"):
        plane._ended("put of 3 rows", call())
    assert ended.wait(10)
    plane.close()


def test_a_library_that_does_not_start_is_named_and_left_behind():
    plane = TransferQueueDataPlane(deadline_s=60.0, startup_deadline_s=0.05)
    may_end = threading.Event()
    with pytest.raises(DataPlaneError, match=r"connect did not end within 0\.05 s"):
        plane._ended_in_thread("connect", lambda: may_end.wait(60), 0.05)
    may_end.set()
    plane.close()
