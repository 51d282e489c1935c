"""The table of advantage estimators: `algorithm.adv_estimator` names one.

An estimator sees the tags of every trajectory of the batch, and those columns of the data plane that it asks for; it answers with
one tensor per trajectory: a scalar (the same for each token) or [T]. The trainer does not know which estimator it runs.
"""

from psrl.algorithms.advantages.base import AdvantageBatch, AdvantageEstimator, advantage_estimators
from psrl.algorithms.advantages.grpo import Grpo

__all__ = ["AdvantageBatch", "AdvantageEstimator", "Grpo", "advantage_estimators"]
