"""What a policy loss is given and what it answers.

Legend: N trained tokens of a micro-batch, rows one after another; padding and observations are not among them.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from psrl.algorithms.rows import Rows
from psrl.config.actor import ActorConfig
from psrl.registry import Registry


@dataclass(frozen=True, kw_only=True, slots=True)
class LossInputs:
    """One value per trained token."""

    logprobs: Tensor  # [N]
    """Of the weights in training; carries the gradient."""
    old_logprobs: Tensor  # [N]
    """Of the weights that the ratio is against; no gradient."""
    rollout_logprobs: Tensor  # [N]
    """As the engine reported them."""
    advantages: Tensor  # [N]
    rows: Rows
    """Which trajectory each token belongs to. Rows are whole: a micro-batch never has a part of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossOutputs:
    """Loss per token, not yet aggregated."""

    values: Tensor  # [N]
    means: dict[str, Tensor] = field(default_factory=dict)
    """[N] each, without gradient: becomes the metric `train/<name>` as a mean over trained tokens, such as `clip/fraction`."""


class PolicyLoss(Protocol):
    """A function of one value per token; it must not mix trajectories, so that any split into micro-batches gives the same loss."""

    @abstractmethod
    def __call__(self, inputs: LossInputs, settings: ActorConfig) -> LossOutputs:
        """Loss and metrics of each token."""


policy_losses: Registry[PolicyLoss] = Registry("policy loss", key="actor.policy_loss")
