"""Whether advantages, losses and critic fit each other and the groups that they are made from: nothing set that nothing reads."""

from __future__ import annotations

from psrl.config.gateway_checks import APPENDING_LOOPS
from psrl.config.refusals import DEFAULTS, refuse, refuse_dead
from psrl.config.tree import Config

ACTOR = "train_actor_rollout_ref.actor"
GEN = "gen_actor_rollout_ref.rollout"

WITHIN_GROUPS = ("grpo", "rloo", "reinforce_plus_plus_baseline", "step_return", "mt_grpo")
"""Estimators that compare the episodes of a group."""
BY_TURN = ("step_return", "mt_grpo")
WITH_DEVIATION = ("grpo", *BY_TURN)
"""Estimators that `norm_adv_by_std_in_grpo` is for."""
DISCOUNTED = ("gae", "reinforce_plus_plus", *BY_TURN)
"""Estimators that read rewards by token or turn, and discount them."""
ESTIMATORS = ("gae", "grpo", "mt_grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "step_return")
LOSSES = ("cispo", "gspo", "ppo_clip", "reinforce")
WITHOUT_DUAL_CLIP = ("cispo", "gspo", "reinforce")


def check_algorithm(config: Config) -> None:
    """`algorithm`'s estimator, the critic, groups, and the actor's loss.

    Raises:
        ConfigError: The first broken rule.
    """
    _check_groups(config)
    _check_estimator(config)
    _check_kl_in_reward(config)
    _check_critic(config)
    _check_loss(config)
    _check_aggregation(config)


def _check_groups(config: Config) -> None:
    psrl, estimator = config.psrl, config.algorithm.adv_estimator
    if estimator in WITHIN_GROUPS and psrl.rollout_n < 2:
        rule = f"algorithm.adv_estimator={estimator} compares the episodes of a group: it needs at least 2"
        refuse(config, "psrl.rollout_n", rule, "set psrl.rollout_n=8")
    if psrl.incomplete_groups == "drop":
        fix = "set psrl.incomplete_groups=allow_partial"
        refuse_dead(config, ["psrl.min_group_size"], because="psrl.incomplete_groups=drop", fix=fix)
    elif psrl.min_group_size > psrl.rollout_n:
        rule = f"is more than a whole group (psrl.rollout_n={psrl.rollout_n})"
        refuse(config, "psrl.min_group_size", rule, f"set psrl.min_group_size={psrl.rollout_n} or less")
    elif psrl.min_group_size < 2 and estimator in WITHIN_GROUPS:
        rule = f"algorithm.adv_estimator={estimator} has no baseline in a group of one"
        refuse(config, "psrl.min_group_size", rule, "set psrl.min_group_size=2")
    if config.algorithm.filter_groups.enable and psrl.rollout_n < 2:
        rule = "leaves out every group: one episode is always of one reward"
        refuse(config, "algorithm.filter_groups.enable", rule, "set psrl.rollout_n=8, or algorithm.filter_groups.enable=false")
    if not config.algorithm.filter_groups.enable:
        keys = ["algorithm.filter_groups.max_num_gen_batches"]
        refuse_dead(config, keys, because="algorithm.filter_groups.enable=false", fix="set algorithm.filter_groups.enable=true")


def _check_estimator(config: Config) -> None:
    estimator = config.algorithm.adv_estimator
    if estimator not in ESTIMATORS:
        return  # the user's own: what it reads is not known
    because = f"algorithm.adv_estimator={estimator}"
    for key, readers in (("norm_adv_by_std_in_grpo", WITH_DEVIATION), ("gamma", DISCOUNTED), ("lam", ("gae",))):
        if estimator not in readers:
            refuse_dead(config, [f"algorithm.{key}"], because=because, fix=f"set algorithm.adv_estimator={readers[0]}")
    loop = config.gen_actor_rollout_ref.rollout.agent.default_agent_loop
    if estimator in BY_TURN and loop not in APPENDING_LOOPS:
        rule = f"compares turns by their number, which means nothing among the branches of {GEN}.agent.default_agent_loop={loop}"
        refuse(config, "algorithm.adv_estimator", rule, "set algorithm.adv_estimator=grpo")


def _check_kl_in_reward(config: Config) -> None:
    estimator, key = config.algorithm.adv_estimator, "algorithm.use_kl_in_reward"
    if not config.algorithm.use_kl_in_reward:
        keys = ["algorithm.kl_penalty", "algorithm.kl_ctrl.kl_coef"]
        refuse_dead(config, keys, because=f"{key}=false", fix=f"set {key}=true")
    elif estimator in ESTIMATORS and estimator not in DISCOUNTED:
        rule = f"has no effect: algorithm.adv_estimator={estimator} reads whole episodes' rewards, not those of tokens"
        refuse(config, key, rule, f"set {ACTOR}.use_kl_loss=true, which has the KL in the loss, and leave {key} out")


def _check_critic(config: Config) -> None:
    if config.algorithm.adv_estimator in ESTIMATORS and config.algorithm.adv_estimator != "gae":
        keys = [key for key in DEFAULTS if key.startswith("critic.")]
        because = f"algorithm.adv_estimator={config.algorithm.adv_estimator} has no critic"
        refuse_dead(config, [*keys, "trainer.critic_warmup"], because=because, fix="set algorithm.adv_estimator=gae")
    optim, steps, warmup = config.critic.optim, config.trainer.total_training_steps, config.trainer.critic_warmup
    if warmup and warmup >= steps:
        rule = f"leaves the policy no step of trainer.total_training_steps={steps}"
        refuse(config, "trainer.critic_warmup", rule, f"set trainer.critic_warmup={max(0, steps - 1)} or less")
    if optim.lr_warmup_steps > steps:
        rule = f"warms up longer than trainer.total_training_steps={steps}"
        refuse(config, "critic.optim.lr_warmup_steps", rule, f"set critic.optim.lr_warmup_steps={steps} or less")
    if optim.lr_scheduler_type == "constant":
        because = "critic.optim.lr_scheduler_type=constant"
        refuse_dead(config, ["critic.optim.min_lr_ratio"], because=because, fix="choose linear or cosine")


def _check_loss(config: Config) -> None:
    actor = config.train_actor_rollout_ref.actor
    if not actor.use_kl_loss:
        keys = [f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"]
        keys += [] if config.algorithm.use_kl_in_reward else ["train_actor_rollout_ref.ref.path"]
        refuse_dead(config, keys, because=f"{ACTOR}.use_kl_loss=false", fix=f"set {ACTOR}.use_kl_loss=true")
    elif actor.kl_loss_coef == 0:
        fix = f"set {ACTOR}.use_kl_loss=false, or a positive coefficient"
        refuse(config, f"{ACTOR}.kl_loss_coef", "a KL term of weight 0 costs a reference model and changes nothing", fix)
    if actor.clip_ratio_high < actor.clip_ratio_low and actor.policy_loss != "cispo":
        fix = f"set {ACTOR}.clip_ratio_high={actor.clip_ratio_low} or more"
        refuse(config, f"{ACTOR}.clip_ratio_high", f"is below {ACTOR}.clip_ratio_low={actor.clip_ratio_low}", fix)
    if actor.policy_loss in WITHOUT_DUAL_CLIP:
        because = f"{ACTOR}.policy_loss={actor.policy_loss}"
        refuse_dead(config, [f"{ACTOR}.clip_ratio_c"], because=because, fix=f"set {ACTOR}.policy_loss=ppo_clip")


def _check_aggregation(config: Config) -> None:
    actor, key = config.train_actor_rollout_ref.actor, f"{ACTOR}.loss_scale_factor"
    if actor.loss_agg_mode != "seq_sum":
        because = f"{ACTOR}.loss_agg_mode={actor.loss_agg_mode}"
        refuse_dead(config, [key], because=because, fix=f"set {ACTOR}.loss_agg_mode=seq_sum")
    elif actor.loss_scale_factor == 0:
        length = config.gen_actor_rollout_ref.rollout.response_length
        refuse(config, key, f"{ACTOR}.loss_agg_mode=seq_sum divides by it", f"set {key}={length} ({GEN}.response_length)")
