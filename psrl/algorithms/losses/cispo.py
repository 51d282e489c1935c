"""CISPO: clipped importance weights around the policy gradient (MiniMax 2025, MiniMax-M1, arXiv 2506.13585, eq. 4 and 5).

The ratio is clipped as a number without gradient, so that no token loses its gradient, also where PPO would clip it away. Published: only
the upper bound is tuned; clip_ratio_low=1 takes the lower one away. Aggregation is token_mean.
"""

from __future__ import annotations

from psrl.algorithms.kl import MAX_LOG_RATIO
from psrl.algorithms.losses.base import LossInputs, LossOutputs, policy_losses
from psrl.config.actor import ActorConfig


@policy_losses.register("cispo")
def cispo(inputs: LossInputs, settings: ActorConfig) -> LossOutputs:
    """-A clip(r, 1 - low, 1 + high) log pi; only its gradient has a meaning.

    Example:
        low 0.2, high 0.28: A = 1, r = 2, log pi = -0.5 gives 0.64, with gradient -1.28 for log pi.
    """
    ratio = (inputs.logprobs - inputs.old_logprobs).detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    weights = ratio.clamp(1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high)
    values = -inputs.advantages * weights * inputs.logprobs
    return LossOutputs(values=values, means={"clip/fraction": (ratio != weights).float()})
