"""Every column of the data plane: dtype, shape, who writes it and who reads it. Nothing else travels.

T is the number of tokens of one trajectory. Rows are ragged: each has its own T.
Tags travel with the keys in `KVBatchMeta` and are all that controllers look at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column."""

    name: str
    dtype: str
    shape: tuple[str, ...]
    writer: str
    readers: tuple[str, ...]
    meaning: str


COLUMNS: tuple[Column, ...] = (
    Column(name="input_ids", dtype="int64", shape=("T",), writer="agent worker", readers=("train worker",),
           meaning="all tokens of the trajectory, in the order in which the model saw them"),
    Column(name="loss_mask", dtype="int8", shape=("T",), writer="agent worker", readers=("train worker",),
           meaning="1 where the policy sampled the token"),
    Column(name="rollout_logprobs", dtype="float32", shape=("T",), writer="agent worker", readers=("train worker",),
           meaning="logprob of the sampled token under the distribution sampled from; 0 elsewhere"),
    Column(name="policy_versions", dtype="int64", shape=("T",), writer="agent worker", readers=("train worker",),
           meaning="weights that sampled the token; -1 elsewhere"),
    Column(name="turn_indices", dtype="int32", shape=("T",), writer="agent worker", readers=("train worker",),
           meaning="turn that sampled the token, from 0; -1 elsewhere"),
    Column(name="rewards", dtype="float32", shape=("T",), writer="agent worker", readers=("train worker",),
           meaning="a step's reward at its turn's last token, what the episode's reward has beyond them at the last sampled one"),
)  # fmt: skip

COLUMN_NAMES: tuple[str, ...] = tuple(column.name for column in COLUMNS)


class TrajectoryTags(TypedDict):
    """What controllers and the packer need to know of a row without fetching it."""

    group: str
    episode: str
    reward: float
    """Never None here: an episode without reward is not put into the data plane."""
    outcome: str
    admitted_version: int
    """V_traj, as the episode was admitted."""
    oldest_version: int
    """Of the weights that sampled the trajectory's tokens, the oldest."""
    num_tokens: int
    num_sampled: int
    num_turns: int
    temperature: float
