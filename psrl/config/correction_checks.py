"""Whether the off-policy correction fits loss, sampling and source of old logprobs: nothing counted twice, nothing without effect."""

from __future__ import annotations

from psrl.config.fields import value_at
from psrl.config.refusals import DEFAULTS, refuse, refuse_dead
from psrl.config.rollout_correction import IS_LEVELS, KEY, is_bounds, rs_criteria
from psrl.config.tree import Config

ACTOR = "train_actor_rollout_ref.actor"
GEN = "gen_actor_rollout_ref.rollout"


def check_correction(config: Config) -> None:
    """Each setting of `algorithm.rollout_correction`, and `actor.old_logprobs` and `actor.policy_loss` with it.

    Raises:
        ConfigError: The first broken rule.
    """
    settings = config.algorithm.rollout_correction
    if settings.rollout_is is not None and settings.rollout_is not in IS_LEVELS:
        refuse(config, f"{KEY}.rollout_is", "is no level", f"set {KEY}.rollout_is to one of {', '.join(IS_LEVELS)}, or null")
    is_bounds(settings.rollout_is_threshold)
    rs_criteria(settings.rollout_rs, settings.rollout_rs_threshold)
    if settings.rollout_is is None:
        refuse_dead(config, [f"{KEY}.rollout_is_threshold"], because=f"{KEY}.rollout_is is null", fix=f"set {KEY}.rollout_is=token")
    if settings.rollout_rs is None:
        refuse_dead(config, [f"{KEY}.rollout_rs_threshold"], because=f"{KEY}.rollout_rs is null", fix=f"set {KEY}.rollout_rs=seq_mean_k1")
    _check_loss(config)
    _check_sampling(config)


def _check_loss(config: Config) -> None:
    actor, settings = config.train_actor_rollout_ref.actor, config.algorithm.rollout_correction
    if actor.policy_loss == "reinforce":
        if actor.old_logprobs == "recompute":
            rule = f"has no effect: {ACTOR}.policy_loss=reinforce has no ratio; its importance weights are of the weights in training"
            refuse(config, f"{ACTOR}.old_logprobs", rule, f"leave {ACTOR}.old_logprobs out")
        _refuse_clipping(config, f"{ACTOR}.policy_loss=reinforce", f"set {ACTOR}.policy_loss=ppo_clip")
    elif settings.rollout_is is not None and actor.old_logprobs == "rollout":
        rule = f"counts the mismatch twice: with {ACTOR}.old_logprobs=rollout the ratio of the loss is against the policy that sampled"
        fix = f"set {ACTOR}.old_logprobs=recompute, or {ACTOR}.policy_loss=reinforce, or leave {KEY}.rollout_is out"
        refuse(config, f"{KEY}.rollout_is", rule, fix)
    elif actor.old_logprobs == "recompute" and actor.ppo_epochs == 1 and actor.ppo_mini_batch_size in (0, config.data.train_batch_size):
        because = f"{ACTOR}.old_logprobs=recompute and one update per buffer: the ratio is 1"
        fix = f"set {ACTOR}.old_logprobs=rollout, or {ACTOR}.ppo_epochs=2"
        _refuse_clipping(config, because, fix)
        if actor.policy_loss in ("gspo", "cispo"):
            refuse_dead(config, [f"{ACTOR}.policy_loss"], because=because, fix=fix)


def _refuse_clipping(config: Config, because: str, fix: str) -> None:
    refuse_dead(config, [f"{ACTOR}.{name}" for name in ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")], because=because, fix=fix)


def _check_sampling(config: Config) -> None:
    """Ratios are of whole distributions."""
    rollout = config.gen_actor_rollout_ref.rollout
    cut = [name for name, is_cut in (("top_p", rollout.top_p < 1), ("top_k", rollout.top_k > 0)) if is_cut]
    for name in ("rollout_is", "rollout_rs", "rollout_token_veto_threshold"):
        if cut and value_at(config, f"{KEY}.{name}") is not None:
            rule = f"cuts the distribution that is sampled from, so that {KEY}.{name} would correct the cut"
            key = f"{GEN}.{cut[0]}"
            refuse(config, key, rule, f"set {key}={DEFAULTS[key]}, or leave {KEY}.{name} out")
