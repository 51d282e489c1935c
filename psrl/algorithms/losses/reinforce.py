"""The policy gradient without a ratio (Williams 1992): for importance weights in place of clipping, as verl's `loss_type: reinforce`."""

from __future__ import annotations

from psrl.algorithms.losses.base import LossInputs, LossOutputs, policy_losses
from psrl.config.actor import ActorConfig


@policy_losses.register("reinforce")
def reinforce(inputs: LossInputs, settings: ActorConfig) -> LossOutputs:
    """-A log pi; only its gradient has a meaning.

    Example:
        A = 2, log pi = -0.5 gives 1, with gradient -2 for log pi.
    """
    return LossOutputs(values=-inputs.advantages * inputs.logprobs)
