"""What the data plane promises: ragged rows by trajectory uid, fetched by column, cleared by key.

Everything that travels is in `columns.py`. Controllers hold `KVBatchMeta` (keys, tags) and never tensors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from transfer_queue import KVBatchMeta

from psrl.data_plane.columns import COLUMNS, TrajectoryTags
from psrl.telemetry.flow import Flow
from psrl.types import Episode, PolicyVersion, Trajectory

DTYPES = {"int64": torch.int64, "int32": torch.int32, "int8": torch.int8, "float32": torch.float32}


PARTITION = "train"
"""Where all rows lie, in TransferQueue's words: only what is trained on travels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryRow:
    """One trajectory on its way into the data plane."""

    key: str
    tags: TrajectoryTags
    columns: dict[str, torch.Tensor]
    """Every column of `columns.py`, each of shape [T]."""


def rows_of(episode: Episode) -> list[TrajectoryRow]:
    """One row for each trajectory of an episode that has a reward; all of them carry the episode's reward."""
    reward = episode.score.reward
    if reward is None:
        return []
    return [
        TrajectoryRow(
            key=trajectory.uid,
            tags=_tags_of(trajectory, episode, reward),
            columns=_columns_of(trajectory, episode.result.step_rewards, reward),
        )
        for trajectory in episode.result.trajectories
        if trajectory.num_sampled > 0
    ]


def oldest_version_of(episode: Episode) -> PolicyVersion | None:
    """The oldest weights that sampled a token of an episode; None where no token was sampled."""
    versions = [version for trajectory in episode.result.trajectories for step in trajectory.steps for version in step.policy_versions]
    return PolicyVersion(min(versions)) if versions else None


def _tags_of(trajectory: Trajectory, episode: Episode, reward: float) -> TrajectoryTags:
    return TrajectoryTags(
        group=episode.ticket.group,
        episode=episode.ticket.uid,
        reward=reward,
        outcome=episode.result.outcome.value,
        admitted_version=episode.ticket.admitted_version,
        oldest_version=min(version for step in trajectory.steps for version in step.policy_versions),
        num_tokens=trajectory.num_tokens,
        num_sampled=trajectory.num_sampled,
        num_turns=trajectory.num_turns,
        temperature=trajectory.temperature,
    )


def rewards_of(trajectory: Trajectory, step_rewards: Sequence[float | None], reward: float) -> list[float]:
    """[T] the episode's reward where it was earned; sums to `reward`.

    A step of the environment follows the turn of the same number. What `reward` has beyond them (a scorer's judgement, a penalty for
    length; without step rewards all of it) came with the end. Branches of a session have no step rewards.

    Example:
        Turns of 2 and 3 tokens behind 1 and 2 observed ones, step rewards 0.5 and None, reward 2: [0, 0, 0.5, 0, 0, 0, 0, 1.5].
    """
    rewards = [0.0] * trajectory.num_tokens
    end = 0
    for index, step in enumerate(trajectory.steps):
        end += len(step.observation_ids) + len(step.sampled_ids)
        if step.sampled_ids:
            last = end - 1
            rewards[last] = (step_rewards[index] or 0.0) if index < len(step_rewards) else 0.0
    rewards[last] += reward - sum(rewards)
    return rewards


def _columns_of(trajectory: Trajectory, step_rewards: Sequence[float | None], reward: float) -> dict[str, torch.Tensor]:
    values = {
        "input_ids": trajectory.ids(),
        "loss_mask": trajectory.loss_mask(),
        "rollout_logprobs": trajectory.logprobs(),
        "policy_versions": trajectory.versions(),
        "turn_indices": trajectory.turn_indices(),
        "rewards": rewards_of(trajectory, step_rewards, reward),
    }
    assert values.keys() == {column.name for column in COLUMNS}, "a column of columns.py is not written"
    # By numpy, which reads a list of numbers three times as fast as torch.
    return {column.name: torch.from_numpy(np.array(values[column.name], dtype=column.dtype)) for column in COLUMNS}


class DataPlane(Protocol):
    """Rows by key. All calls block for at most the deadline that the implementation was given."""

    flow: Flow
    """Of rows that left or reached this process by `put` and `fetch`."""

    @abstractmethod
    def put(self, rows: Sequence[TrajectoryRow]) -> KVBatchMeta:
        """Store rows; a key that is there already gets the new row (a retried episode keeps its uid).

        Raises:
            DataPlaneError: The rows could not be stored; none of them may be counted on.
        """

    @abstractmethod
    def fetch(self, keys: Sequence[str], columns: Sequence[str]) -> list[dict[str, torch.Tensor]]:
        """[one dict of 1-D tensors per key, in the order of `keys`], only the columns asked for.

        Raises:
            DataPlaneError: A key or column is not there, or the data plane did not answer.
        """

    @abstractmethod
    def keys(self) -> list[str]:
        """Every key, in no order that counts."""

    @abstractmethod
    def clear(self, keys: Sequence[str]) -> None:
        """Forget rows; keys that are not there are ignored."""

    @abstractmethod
    def give_up(self) -> None:
        """The run ends: calls that wait, or would wait, fail now with DataPlaneError instead of at their deadline."""
