"""Training on stored episodes: what reaches the data plane is what the engine once gave, and what cannot be trained on is refused."""

import asyncio
import copy
import json
import math
from functools import cache

import pytest
import torch
from runtime.stored_kit import episode_of, run_folder, train_file

from psrl.config.fields import value_at
from psrl.config.load import load_config
from psrl.data_plane import COLUMN_NAMES, MemoryDataPlane, rows_of
from psrl.errors import ConfigError
from psrl.runtime.groups import GroupRequest
from psrl.runtime.stored_groups import StoredGroups, StoredPlayer
from psrl.runtime.tickets import training_tickets
from psrl.types import Outcome


@cache
def base():
    return load_config("retool_tiny", ["data.train_batch_size=2", "psrl.rollout_n=2", "data.shuffle=false"])


def config_of(path, **settings):
    """Set here and not loaded, which takes a while; `test_settings_of_playing_are_refused` loads."""
    config = copy.deepcopy(base())
    config.data.trajectory_files = [str(path)]
    for key, value in settings.items():
        section, _, name = key.rpartition("__")
        setattr(value_at(config, section.replace("__", ".")), name, value)
    return config


def stored(tmp_path, episodes, **settings):
    return StoredGroups.of(config_of(train_file(run_folder(tmp_path / "run", episodes)), **settings))


def groups_of(*names, count=2, **fields):
    return [episode_of(name, index, **fields) for name in names for index in range(count)]


def played(groups, task, *, version=5, wants_records=False, plane=None):
    plane = plane or MemoryDataPlane()
    tickets = training_tickets(task, rollout_n=2, version=version, run_seed=1)
    request = GroupRequest(task=task, tickets=tickets, wants_records=wants_records)
    return asyncio.run(StoredPlayer(groups, plane).play(request, what="group", deadline_s=1.0)), plane


def test_ids_mask_and_logprobs_reach_the_data_plane_to_the_last_bit(tmp_path):
    episodes = groups_of("train-0-7", "train-0-8")
    groups = stored(tmp_path, episodes)
    source = groups.source(base(), [])
    task = source.next_tasks(2)[1]
    result, plane = played(groups, task)
    assert task.uid == "train-0-1" and task.prompt == episodes[2].task.prompt
    assert result.meta.keys == ["train-0-1-e0-t0", "train-0-1-e1-t0"]
    fetched = plane.fetch(result.meta.keys, COLUMN_NAMES)
    fresh = [row.columns for episode in episodes[2:] for row in rows_of(episode)]
    for name in set(COLUMN_NAMES) - {"policy_versions"}:
        assert all(torch.equal(ours[name], theirs[name]) for ours, theirs in zip(fetched, fresh, strict=True)), name
    # Version 3 of another run says nothing here: all stored tokens are of the weights before the first update.
    assert fetched[0]["policy_versions"].tolist() == [-1, -1, -1, 0, 0, 0]


def test_a_stored_group_has_no_age_and_no_time_but_its_rewards(tmp_path):
    groups = stored(tmp_path, [episode_of(name, index, reward=float(index)) for name in "ab" for index in range(2)])
    source = groups.source(base(), [])
    result, _ = played(groups, source.next_tasks(1)[0], wants_records=True)
    assert result.oldest_version is None
    assert result.rewards == [0.0, 1.0]
    assert {summary.timings.total_s for summary in result.summaries} == {0.0}
    assert [record.ticket.uid for record in result.records] == ["train-0-0-e0", "train-0-0-e1"]
    assert {tags["admitted_version"] for tags in result.meta.tags} == {5}


def test_an_epoch_gives_every_group_once_and_the_next_one_other_uids(tmp_path):
    groups = stored(tmp_path, groups_of("a", "b", "c"))
    shuffled = config_of("unused", data__shuffle=True)
    source = groups.source(shuffled, [])
    uids = [task.uid for task in source.next_tasks(6)]
    assert sorted(uids[:3]) == ["train-0-0", "train-0-1", "train-0-2"]
    assert sorted(uids[3:]) == ["train-1-0", "train-1-1", "train-1-2"]
    again = groups.source(shuffled, [])
    again.load_state_dict(source.state_dict())
    assert [task.uid for task in again.next_tasks(2)] == [task.uid for task in source.next_tasks(2)]
    keys = {key for task in (source.task_of("train-0-1"), source.task_of("train-1-1")) for key in played(groups, task)[0].meta.keys}
    assert len(keys) == 4


def test_groups_that_lost_members_are_left_out_and_counted_or_taken_smaller(tmp_path):
    episodes = [*groups_of("a", "b", "c", count=3), episode_of("d", 0), episode_of("d", 1, reward=None, outcome=Outcome.INFRA_ERROR)]
    groups = stored(tmp_path, episodes)
    assert str(groups) == "training on 3 stored groups; 1 are not whole and are left out (1 episodes have no reward)"
    assert [len(group.offsets) for group in groups.groups] == [2, 2, 2]
    path = train_file(run_folder(tmp_path / "other", episodes))
    partial = StoredGroups.of(config_of(path, psrl__rollout_n=3, psrl__incomplete_groups="allow_partial", psrl__min_group_size=2))
    assert [len(group.offsets) for group in partial.groups] == [3, 3, 3]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"trajectories": ()}, "has no tokens: it was played by a model that somebody else serves"),
        ({"logprobs": [-1.0, math.nan, -1.0]}, "has sampled tokens without a logprob"),
        ({"temperature": 0.0}, "is greedy"),
        ({"ids": (9, 11, 10**6)}, "has token ids beyond the model's vocabulary"),
        ({"ids": [9] * 20000, "logprobs": [-1.0] * 20000}, "nothing is ever cut"),
    ],
)
def test_an_episode_that_cannot_be_trained_on_is_refused_by_name(tmp_path, fields, said):
    with pytest.raises(ConfigError) as info:
        stored(tmp_path, [*groups_of("a", "b"), episode_of("c", 0, **fields)])
    assert said in info.value.rule and "c-e0 of" in info.value.value and info.value.key == "data.trajectory_files"


def test_episodes_of_validation_are_not_trained_on(tmp_path):
    path = train_file(run_folder(tmp_path / "run", groups_of("a", "b")))
    lines = [json.dumps({**json.loads(line), "is_validation": True}) + "\n" for line in path.read_text().splitlines()]
    path.write_text("".join(lines))
    with pytest.raises(ConfigError, match="is an episode of validation"):
        StoredGroups.of(config_of(path))


@pytest.mark.parametrize(
    ("settings", "said", "fix"),
    [
        ({"psrl__rollout_n": 4}, "no group has the 4 judged episodes", "set psrl.rollout_n=2"),
        ({"data__train_batch_size": 4}, "has 2 groups with 2 judged episodes, less than one batch", "data.train_batch_size=2"),
    ],
)
def test_too_few_whole_groups_are_refused_with_what_there_is(tmp_path, settings, said, fix):
    with pytest.raises(ConfigError) as info:
        stored(tmp_path, groups_of("a", "b"), **settings)
    assert said in info.value.rule and fix in info.value.fix


def test_settings_of_playing_are_refused(tmp_path):
    path = train_file(run_folder(tmp_path / "run", groups_of("a", "b")))
    with pytest.raises(ConfigError, match="has no effect on stored trajectories"):
        load_config("retool_tiny", [f"data.trajectory_files=['{path}']", "psrl.redundant_episodes=1"])
    with pytest.raises(ConfigError, match="is not on this machine"):
        load_config("retool_tiny", ["data.trajectory_files=[/nowhere.jsonl]"])


def test_episodes_of_a_cut_distribution_are_refused_where_a_ratio_would_correct_the_cut(tmp_path):
    run = run_folder(tmp_path / "run", groups_of("a", "b"), "gen_actor_rollout_ref: {rollout: {top_p: 0.9}}")
    with pytest.raises(ConfigError, match=r"was sampled with top_p=0\.9"):
        StoredGroups.of(config_of(train_file(run)))
    uncorrected = {"algorithm__rollout_correction__rollout_is": None, "train_actor_rollout_ref__actor__old_logprobs": "rollout"}
    assert len(StoredGroups.of(config_of(train_file(run), **uncorrected)).groups) == 2
