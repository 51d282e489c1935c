"""GSPO: one ratio for a whole trajectory (Zheng et al. 2025, Group sequence policy optimization, arXiv 2507.18071, eq. 5 and 7).

s = exp(mean over the trajectory's tokens of log r), clipped as PPO clips a token's ratio. It is the token form (GSPO-token, eq. 13 and 14):
equal in value, and each token's gradient is the trajectory's ratio times its own advantage. Published: clip_ratio_low 3e-4,
clip_ratio_high 4e-4, loss_agg_mode seq_mean. A geometric mean hardly moves, so the bounds of PPO (0.2) never clip.
"""

from __future__ import annotations

import torch

from psrl.algorithms.losses.base import LossInputs, LossOutputs, policy_losses
from psrl.config.actor import ActorConfig

MAX_LOG_RATIO = 10.0
"""Of the trajectory's mean log ratio from above; verl's bound."""


@policy_losses.register("gspo")
def gspo(inputs: LossInputs, settings: ActorConfig) -> LossOutputs:
    """max(-A s, -A clip(s, 1 - low, 1 + high)).

    Example:
        Two tokens with r = 2 and 0.5: s = 1 for both; A = 1 gives -1, and -1 as gradient of each.
    """
    advantages = inputs.advantages
    log_ratio_R = inputs.rows.mean((inputs.logprobs - inputs.old_logprobs).detach())
    log_ratio_N = inputs.rows.spread(log_ratio_R).to(inputs.logprobs.dtype)
    ratio = (inputs.logprobs - inputs.logprobs.detach() + log_ratio_N).clamp(max=MAX_LOG_RATIO).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high)
    return LossOutputs(values=torch.maximum(plain, clipped), means={"clip/fraction": (clipped > plain).detach().float()})
