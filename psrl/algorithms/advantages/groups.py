"""Rewards by group and episode: what every baseline over a group is made of.

A group is every episode of one task, found by its uid, never by position. Statistics are over episodes: an episode with three
branches counts once, and all its trajectories get its advantage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from psrl.errors import TrainingError

EPSILON = 1e-6
"""Added to a deviation before it divides, as verl does."""
Baseline = Callable[[Sequence[float]], list[float]]
"""From the rewards of a group to the advantages of the same episodes."""


def rewards_by_group(tags: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Group -> episode -> reward.

    Raises:
        TrainingError: A reward is not finite, or an episode's trajectories disagree about it.
    """
    groups: dict[str, dict[str, float]] = {}
    for each in tags:
        reward = float(each["reward"])
        if not math.isfinite(reward):
            raise TrainingError(f"episode {each['episode']} has reward {reward}")
        known = groups.setdefault(each["group"], {}).setdefault(each["episode"], reward)
        if known != reward:
            raise TrainingError(f"trajectories of episode {each['episode']} have rewards {known} and {reward}")
    return groups


def episode_advantages(tags: Sequence[Mapping[str, Any]], baseline: Baseline) -> list[Tensor]:
    """A scalar for each trajectory: `baseline` applied to the rewards of its group. Raises TrainingError."""
    advantages = {
        group: dict(zip(rewards, baseline(list(rewards.values())), strict=True)) for group, rewards in rewards_by_group(tags).items()
    }
    return [torch.tensor(advantages[each["group"]][each["episode"]], dtype=torch.float32) for each in tags]


def centred(rewards: Sequence[float], *, divide: bool) -> list[float]:
    """Distance to the mean of the group, divided by its deviation (n - 1 in the denominator) where asked for.

    A group of one has no baseline: 0. Equal rewards give 0 exactly, so that no rounding noise is divided by a tiny deviation.

    Example:
        1, 1, -1, -1 -> mean 0, deviation sqrt(4/3) = 1.1547 -> 0.8660, 0.8660, -0.8660, -0.8660.
    """
    if len(set(rewards)) <= 1:
        return [0.0] * len(rewards)
    mean = sum(rewards) / len(rewards)
    deviation = math.sqrt(sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1))
    scale = deviation + EPSILON if divide else 1.0
    return [(reward - mean) / scale for reward in rewards]
