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
class KlCtrlConfig:
    """The weight of the KL in the reward; verl's other controller, `adaptive`, is not there."""

    kl_coef: float = 0.001


@dataclass(kw_only=True)
class AlgorithmConfig:
    """Names of `algorithms.advantages` and what they need."""

    adv_estimator: str = "grpo"
    """`grpo`, `rloo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `gae` (with a critic), `step_return`, `mt_grpo`; what each of
    them is and what it needs: docs/algorithms.md."""
    norm_adv_by_std_in_grpo: bool = True
    """Whether differences within a group are divided by its deviation, in `grpo`, `step_return` and `mt_grpo`; false gives Dr. GRPO's
    advantage."""
    gamma: float = 1.0
    """Discount: per sampled token in `gae` and `reinforce_plus_plus`, per turn in `step_return` and `mt_grpo`."""
    lam: float = 1.0
    """Of `gae`: 1 takes whole returns (no bias of the critic's), less trusts the critic's values (less variance)."""
    use_kl_in_reward: bool = False
    """Each sampled token's reward is less kl_ctrl.kl_coef times its KL to the frozen reference (`ref`), for estimators that read rewards by
    token; train_actor_rollout_ref.actor.use_kl_loss has the KL in the loss instead."""
    kl_penalty: str = "k1"
    """Estimate of that KL, of the policy that sampled: `k1`, `k2` or `k3`."""
    kl_ctrl: KlCtrlConfig = field(default_factory=KlCtrlConfig)
    filter_groups: FilterGroupsConfig = field(default_factory=FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = field(default_factory=RolloutCorrectionConfig)
    mask_truncated: bool = False
    """DAPO's overlong filtering: trajectories cut by a token limit get no loss (they stay in the baseline)."""
