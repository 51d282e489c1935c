"""GRPO: an episode's reward against the mean of its group (DeepSeekMath, section 4.1; Dr. GRPO without the division).

A group is every episode of one task, found by its uid, never by position. Statistics are over episodes: an episode with three
branches counts once, and all its trajectories get its advantage. Cases that the formula leaves open:

- a group of one episode has no baseline: advantage 0;
- equal rewards: advantage 0, exactly (no rounding noise is divided by a tiny deviation);
- groups may have different sizes (members dropped): each has its own mean and deviation.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from psrl.algorithms.advantages.base import AdvantageBatch, advantage_estimators
from psrl.config.algorithm import AlgorithmConfig
from psrl.errors import TrainingError

EPSILON = 1e-6
"""Added to the deviation, as verl does."""


@advantage_estimators.register("grpo")
class Grpo:
    """(reward - group mean) / (group deviation + 1e-6); the deviation has n - 1 in its denominator.

    Example:
        Rewards 1, 1, -1, -1 -> mean 0, deviation sqrt(4/3) = 1.1547 -> 0.8660, 0.8660, -0.8660, -0.8660.
    """

    needed_columns: ClassVar[tuple[str, ...]] = ()

    def estimate(self, batch: AdvantageBatch, settings: AlgorithmConfig) -> list[Tensor]:
        """A scalar for each trajectory.

        Raises:
            TrainingError: A reward is not finite, or an episode's trajectories disagree about it.
        """
        groups: dict[str, dict[str, float]] = {}
        for tags in batch.tags:
            reward = float(tags["reward"])
            if not math.isfinite(reward):
                raise TrainingError(f"episode {tags['episode']} has reward {reward}")
            known = groups.setdefault(tags["group"], {}).setdefault(tags["episode"], reward)
            if known != reward:
                raise TrainingError(f"trajectories of episode {tags['episode']} have rewards {known} and {reward}")
        by_group = {group: _normalised(rewards, settings.norm_adv_by_std_in_grpo) for group, rewards in groups.items()}
        return [torch.tensor(by_group[tags["group"]][tags["episode"]], dtype=torch.float32) for tags in batch.tags]


def _normalised(rewards: dict[str, float], divide: bool) -> dict[str, float]:
    values = list(rewards.values())
    if len(set(values)) <= 1:
        return dict.fromkeys(rewards, 0.0)
    mean = sum(values) / len(values)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    scale = deviation + EPSILON if divide else 1.0
    return {episode: (reward - mean) / scale for episode, reward in rewards.items()}
