"""The table of advantage estimators: `algorithm.adv_estimator` names one.

An estimator sees the tags of every trajectory of the batch, and those columns of the data plane that it asks for; it answers with
one tensor per trajectory: a scalar (the same for each token) or [T]. The trainer does not know which estimator it runs.
"""

from psrl.algorithms.advantages.base import AdvantageBatch, AdvantageEstimator, Estimates, advantage_estimators
from psrl.algorithms.advantages.gae import Gae
from psrl.algorithms.advantages.grpo import Grpo
from psrl.algorithms.advantages.mt_grpo import MtGrpo
from psrl.algorithms.advantages.reinforce_plus_plus import ReinforcePlusPlus, ReinforcePlusPlusBaseline
from psrl.algorithms.advantages.rloo import Rloo
from psrl.algorithms.advantages.step_return import StepReturn

__all__ = [
    "AdvantageBatch",
    "AdvantageEstimator",
    "Estimates",
    "Gae",
    "Grpo",
    "MtGrpo",
    "ReinforcePlusPlus",
    "ReinforcePlusPlusBaseline",
    "Rloo",
    "StepReturn",
    "advantage_estimators",
]
