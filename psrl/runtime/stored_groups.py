"""Stored groups in the place of played ones: what `psrl train --from-trajectories` trains on.

Invariant: a group that the source gives is one that can be trained on: judged, with exact tokens and logprobs, whole. What cannot be is
refused, or left out and counted, before anything starts. Ids, mask and logprobs reach the data plane as the engine gave them. Policy
versions do not: those of another run mean nothing to this one, so every stored token is of version 0, older than any update made here.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from psrl.config.model_size import read_model_size
from psrl.config.stored_checks import KEY, check_stored_sampling
from psrl.config.tree import Config
from psrl.data_plane import DataPlane, rows_of
from psrl.datasets.source import SourceReport, TaskSource, row_of
from psrl.errors import ConfigError
from psrl.runtime.group_play import Member
from psrl.runtime.groups import GroupRequest, GroupResult, summary_of
from psrl.telemetry.trajectories import EpisodeRecord, read_episode_at, read_trajectories
from psrl.types import Episode, EpisodeTicket, EpisodeUid, GroupUid, Task, TaskUid, Timings, Trajectory, TrajectoryUid

STARTING_VERSION = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredGroup:
    """Where the episodes of one task lie."""

    task: Task
    path: Path
    offsets: tuple[int, ...]
    """Of the judged ones, `psrl.rollout_n` at most."""


class StoredGroups:
    """The groups of `data.trajectory_files` that can be trained on, in the order of the files. Holds no tokens."""

    def __init__(self, groups: Sequence[StoredGroup], *, num_left_out: int, num_unjudged: int) -> None:
        self.groups = tuple(groups)
        self._num_left_out, self._num_unjudged = num_left_out, num_unjudged

    @classmethod
    def of(cls, config: Config) -> StoredGroups:
        """Read all files once and check every episode.

        Raises:
            ConfigError: An episode cannot be trained on, or too few groups are whole; names the episode, and the fix.
        """
        check = _TrainableCheck(config)
        tasks: dict[tuple[Path, GroupUid], Task] = {}
        judged: dict[tuple[Path, GroupUid], dict[EpisodeUid, int]] = {}
        num_unjudged = 0
        for path in map(Path, config.data.trajectory_files):
            check_stored_sampling(config, path)
            for record in read_trajectories(path):
                episode = record.episode
                group = (path, episode.ticket.group)
                tasks.setdefault(group, episode.task)
                members = judged.setdefault(group, {})
                if episode.score.reward is None:
                    num_unjudged += 1
                    continue
                check.episode(record, path)
                members[episode.ticket.uid] = record.offset
        rollout_n = config.psrl.rollout_n
        num_needed = rollout_n if config.psrl.incomplete_groups == "drop" else config.psrl.min_group_size
        whole = [
            StoredGroup(task=tasks[group], path=group[0], offsets=tuple(members.values())[:rollout_n])
            for group, members in judged.items()
            if len(members) >= num_needed
        ]
        _check_number(config, whole, sizes=Counter(map(len, judged.values())), num_needed=num_needed)
        kept = whole[: config.data.train_max_samples or None]
        return cls(kept, num_left_out=len(judged) - len(whole), num_unjudged=num_unjudged)

    def source(self, config: Config, val: Sequence[Task]) -> TaskSource:
        """Their tasks, in the order and the epochs of any other run; a group's uid is that of its task, a new one in each epoch."""
        report = SourceReport(num_train=len(self.groups), num_val=len(val), bad_row_counts={}, num_overlong=0)
        tasks = [group.task for group in self.groups]
        return TaskSource(tasks, val, shuffle=config.data.shuffle, seed=config.data.seed, report=report)

    def __str__(self) -> str:
        """`training on 64 stored groups; 2 are not whole and are left out (5 episodes have no reward)`"""
        left_out = f"; {self._num_left_out} are not whole and are left out" if self._num_left_out else ""
        unjudged = f" ({self._num_unjudged} episodes have no reward)" if self._num_unjudged else ""
        return f"training on {len(self.groups)} stored groups{left_out}{unjudged}"

    def episodes_of(self, uid: GroupUid) -> list[Episode]:
        """Those of the group that the source named so."""
        group = self.groups[row_of(uid)]
        return [read_episode_at(group.path, offset).episode for offset in group.offsets]


class StoredPlayer:
    """Answers requests with stored groups, as a `WorkerPool` does with played ones."""

    def __init__(self, stored: StoredGroups, data_plane: DataPlane) -> None:
        self._stored = stored
        self._data_plane = data_plane

    async def play(self, request: GroupRequest, *, what: str, deadline_s: float) -> GroupResult:
        """The group's episodes under the request's tickets; their rows are in the data plane.

        Waits for: disk and data plane. Unblocked by: the data plane's own deadline.

        Raises:
            ConfigError: The file has changed since the start.
            DataPlaneError: The rows could not be stored.
        """
        return await asyncio.to_thread(self._read, request)

    def _read(self, request: GroupRequest) -> GroupResult:
        stored = self._stored.episodes_of(request.tickets[0].group)
        episodes = [retold(episode, ticket) for episode, ticket in zip(stored, request.tickets, strict=False)]
        rows = [row for episode in episodes for row in rows_of(episode)]
        members = (Member(ticket=episode.ticket, episode=episode, num_retries=0) for episode in episodes)
        return GroupResult(
            group=request.tickets[0].group,
            summaries=tuple(map(summary_of, members)),
            meta=self._data_plane.put(rows),
            records=tuple(episodes) if request.wants_records else (),
            oldest_version=None,  # The bound is on data that is made while weights change; this was all made before.
            attempt=request.attempt,
        )


def retold(episode: Episode, ticket: EpisodeTicket) -> Episode:
    """A stored episode as one of this run: its ticket and uids, every token of the starting version, no time spent on it."""
    trajectories = []
    for branch, stored in enumerate(episode.result.trajectories):
        trajectory = Trajectory(uid=TrajectoryUid(f"{ticket.uid}-t{branch}"))
        for step in stored.steps:
            trajectory.append(replace(step, policy_versions=[STARTING_VERSION] * len(step.sampled_ids)))
        trajectories.append(trajectory)
    task = replace(episode.task, uid=TaskUid(ticket.group))
    result = replace(episode.result, trajectories=tuple(trajectories))
    return replace(episode, ticket=ticket, task=task, result=result, timings=Timings())


class _TrainableCheck:
    """Whether an episode can be trained on under these settings."""

    def __init__(self, config: Config) -> None:
        self._vocab_size = read_model_size(config.train_actor_rollout_ref.model.path).vocab_size
        self._max_tokens = config.train_actor_rollout_ref.actor.ppo_max_token_len_per_gpu

    def episode(self, record: EpisodeRecord, path: Path) -> None:
        """Raises ConfigError, with the episode's uid, where it cannot."""
        episode = record.episode
        for rule, fix in self._faults(episode):
            raise ConfigError(key=KEY, value=f"{episode.ticket.uid} of {path}", rule=rule, fix=fix)

    def _faults(self, episode: Episode) -> Iterator[tuple[str, str]]:
        trained = [trajectory for trajectory in episode.result.trajectories if trajectory.num_sampled]
        engines = "play the tasks with psrl's engines: psrl rollout RECIPE, without a URL"
        if episode.ticket.is_validation:
            yield "is an episode of validation: trained on, it would say nothing any more", "name a train.jsonl"
        if not trained:
            yield "has no tokens: it was played by a model that somebody else serves, which says neither ids nor logprobs", engines
        for trajectory in trained:
            if {step.temperature for step in trajectory.steps} != {trajectory.steps[0].temperature}:
                yield "mixes sampling temperatures", engines
            if not trajectory.steps[0].temperature > 0:
                yield "is greedy: there is no distribution to learn from", "store episodes of a positive temperature"
            if not all(math.isfinite(value) for step in trajectory.steps for value in step.logprobs):
                yield "has sampled tokens without a logprob, which the loss and every measure of its age need", engines
            if max(trajectory.ids()) >= self._vocab_size:
                rule = f"has token ids beyond the model's vocabulary of {self._vocab_size}: another tokenizer made them"
                yield rule, "set train_actor_rollout_ref.model.path to a model with the tokenizer that the episodes were played with"
            if trajectory.num_tokens > self._max_tokens:
                key = "train_actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
                yield f"has {trajectory.num_tokens} tokens, more than {key}={self._max_tokens}; nothing is ever cut", f"raise {key}"


def _check_number(config: Config, whole: Sequence[StoredGroup], *, sizes: Counter[int], num_needed: int) -> None:
    files, batch = config.data.trajectory_files, config.data.train_batch_size
    num_kept = len(whole[: config.data.train_max_samples or None])
    if not whole:
        found = ", ".join(f"{count} of {size}" for size, count in sorted(sizes.items(), reverse=True)) or "none"
        rule = f"no group has the {num_needed} judged episodes that these settings ask for; groups by judged episodes: {found}"
        largest = max(sizes, default=0)
        fix = f"set psrl.rollout_n={largest}" if largest > 1 else "store more episodes of each task: psrl rollout RECIPE psrl.rollout_n=8"
        raise ConfigError(key=KEY, value=files, rule=rule, fix=f"{fix}; episodes without a reward: psrl regrade")
    if num_kept < batch:
        rule = f"has {num_kept} groups with {num_needed} judged episodes, less than one batch (data.train_batch_size={batch})"
        raise ConfigError(key=KEY, value=files, rule=rule, fix=f"set data.train_batch_size={num_kept} or less, or name more files")
