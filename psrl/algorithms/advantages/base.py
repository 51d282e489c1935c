"""What an advantage estimator is given and what it answers.

Legend: T tokens of one trajectory, n those of them that the policy sampled.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import Tensor

from psrl.config.algorithm import AlgorithmConfig
from psrl.registry import Registry


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvantageBatch:
    """Every trajectory of one training step, those of other ranks included: baselines need whole groups."""

    tags: Sequence[Mapping[str, Any]]
    """`TrajectoryTags` of each trajectory."""
    has_loss: Sequence[bool]
    """Of each trajectory, whether it is trained on; others are in baselines, but in no statistic over tokens."""
    columns: Sequence[Mapping[str, Tensor]] = field(default_factory=tuple)
    """For each trajectory the [T] columns that the estimator asked for; empty when it asked for none."""
    values: Sequence[Tensor] = field(default_factory=tuple)
    """For each trajectory [n] what the critic expects before each sampled token, [0] where it has no loss; empty without a critic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimates:
    """One float32 tensor per trajectory, in the order of the batch."""

    advantages: list[Tensor]
    """A scalar (the same for each token) or [T]."""
    returns: list[Tensor] = field(default_factory=list)
    """[n] what the critic should have said; empty for estimators without one."""


class AdvantageEstimator(Protocol):
    """From rewards to advantages."""

    needed_columns: ClassVar[tuple[str, ...]]
    """Columns of the data plane that are fetched for all trajectories; leave empty where tags are enough."""
    needs_critic: ClassVar[bool] = False
    """Whether `values` must be there."""

    @abstractmethod
    def estimate(self, batch: AdvantageBatch, settings: AlgorithmConfig) -> Estimates:
        """Advantages of every trajectory; the same on every rank, from the same batch.

        Raises:
            TrainingError: A reward cannot be used.
        """


advantage_estimators: Registry[type[AdvantageEstimator]] = Registry("advantage estimator", key="algorithm.adv_estimator")
