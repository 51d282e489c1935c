"""What an advantage estimator is given and what it answers.

Legend: T tokens of one trajectory.
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
    columns: Sequence[Mapping[str, Tensor]] = field(default_factory=tuple)
    """For each trajectory the [T] columns that the estimator asked for; empty when it asked for none."""


class AdvantageEstimator(Protocol):
    """From rewards to advantages."""

    needed_columns: ClassVar[tuple[str, ...]]
    """Columns of the data plane that are fetched for all trajectories; leave empty where tags are enough."""

    @abstractmethod
    def estimate(self, batch: AdvantageBatch, settings: AlgorithmConfig) -> list[Tensor]:
        """One float32 tensor per trajectory, in order: a scalar or [T]."""


advantage_estimators: Registry[type[AdvantageEstimator]] = Registry("advantage estimator", key="algorithm.adv_estimator")
