"""`algorithm`: advantages, the choice of groups, off-policy correction."""

from dataclasses import dataclass, field

from psrl.config.rollout_correction import RolloutCorrectionConfig


@dataclass(kw_only=True)
class FilterGroupsConfig:
    """DAPO's dynamic sampling: groups whose rewards are all equal are replaced by others."""

    enable: bool = False
    max_num_gen_batches: int = 10
    """Groups that may be filtered between two steps, in batches of tasks, times (psrl.staleness + 1), because groups of several steps
    may arrive before the first; with more the run stops with the histogram of pass rates."""


@dataclass(kw_only=True)
class AlgorithmConfig:
    """Names of `algorithms.advantages` and what they need."""

    adv_estimator: str = "grpo"
    norm_adv_by_std_in_grpo: bool = True
    """False gives Dr. GRPO's advantage."""
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    mask_truncated: bool = False
    """DAPO's overlong filtering: trajectories cut by a token limit get no loss (they stay in the baseline)."""
