"""`critic`: the value model of `algorithm.adv_estimator=gae`. Without it the section has no effect, and setting it is refused.

Names and meanings are verl's. Epochs, mini-batches, micro-batches and aggregation are the actor's (`actor.ppo_mini_batch_size`, ...).
"""

from dataclasses import dataclass, field

from psrl.config.actor import OptimConfig


@dataclass(kw_only=True)
class CriticModelConfig:
    """Where the critic starts."""

    path: str | None = None
    """Folder of a causal LM; its output embedding is replaced by a value head that starts at 0. None takes the policy's."""


@dataclass(kw_only=True)
class CriticOptimConfig(OptimConfig):
    """The policy's optimizer at another rate."""

    lr: float = 1e-5


@dataclass(kw_only=True)
class CriticConfig:
    """Value model, its loss and its optimizer."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    optim: CriticOptimConfig = field(default_factory=CriticOptimConfig)
    cliprange_value: float = 0.5
    """How far an update may move a value from where it was at the start of the buffer before its gradient ends."""
    grad_clip: float = 1.0
    ppo_epochs: int = 0
    """How often a buffer is learnt from; 0 takes actor.ppo_epochs."""
