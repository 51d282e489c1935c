"""PPO's clipped surrogate (Schulman 2017, eq. 7) with DAPO's clip-higher and the dual clip (Ye 2020, eq. 5).

The dual clip bounds the loss of a token with a negative advantage, whose ratio would otherwise be unbounded above.
"""

from __future__ import annotations

import torch

from psrl.algorithms.kl import MAX_LOG_RATIO
from psrl.algorithms.losses.base import LossInputs, LossOutputs, policy_losses
from psrl.config.actor import ActorConfig


@policy_losses.register("ppo_clip")
def ppo_clip(inputs: LossInputs, settings: ActorConfig) -> LossOutputs:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), and at most -A c where A < 0.

    Example:
        low 0.2, high 0.28, c 3: A = 1, r = 1.5 gives -1.28; A = -1, r = 0.5 gives 0.8; A = -1, r = 5 gives 3.
    """
    advantages = inputs.advantages
    ratio = (inputs.logprobs - inputs.old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - settings.clip_ratio_low, 1 + settings.clip_ratio_high)
    single = torch.maximum(plain, clipped)
    bound = -advantages * settings.clip_ratio_c
    is_negative = advantages < 0
    values = torch.where(is_negative, torch.minimum(single, bound), single)
    with torch.no_grad():
        means = {"clip/fraction": (clipped > plain).float(), "dual_clip/fraction": (is_negative & (single > bound)).float()}
    return LossOutputs(values=values, means=means)
