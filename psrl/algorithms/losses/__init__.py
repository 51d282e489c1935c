"""The table of policy losses: `actor.policy_loss` names one. One loss, one file."""

from psrl.algorithms.losses.base import LossInputs, LossOutputs, PolicyLoss, policy_losses
from psrl.algorithms.losses.cispo import cispo
from psrl.algorithms.losses.gspo import gspo
from psrl.algorithms.losses.ppo_clip import ppo_clip
from psrl.algorithms.losses.reinforce import reinforce

__all__ = ["LossInputs", "LossOutputs", "PolicyLoss", "cispo", "gspo", "policy_losses", "ppo_clip", "reinforce"]
