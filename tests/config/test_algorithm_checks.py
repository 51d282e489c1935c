"""Advantages, losses and critic that do not fit each other are refused before anything starts; what is published is accepted."""

import pytest
from config_files import write_recipe

from psrl.algorithms.advantages import advantage_estimators
from psrl.algorithms.losses import policy_losses
from psrl.config.algorithm_checks import ESTIMATORS, LOSSES
from psrl.config.load import load_config
from psrl.errors import ConfigError

ACTOR = "train_actor_rollout_ref.actor"
GAE = "algorithm.adv_estimator=gae"
GSPO = f"{ACTOR}.policy_loss=gspo"
RECOMPUTE = f"{ACTOR}.old_logprobs=recompute"

# (overrides, key of the error, words of the message)
WRONG = [
    (["critic.optim.lr=1e-4"], "critic.optim.lr", "has no critic"),
    (["critic.model.path=/critic"], "critic.model.path", "adv_estimator=gae"),
    ([GAE, "critic.model.path=/critic"], "critic.model.path", "is not on this machine"),
    (["trainer.critic_warmup=3"], "trainer.critic_warmup", "has no critic"),
    ([GAE, "trainer.critic_warmup=10"], "trainer.critic_warmup", "leaves the policy no step"),
    ([GAE, "critic.cliprange_value=0"], "critic.cliprange_value", "above 0"),
    ([GAE, "critic.optim.lr_warmup_steps=99"], "critic.optim.lr_warmup_steps", "warms up longer"),
    ([GAE, "critic.optim.min_lr_ratio=0.1"], "critic.optim.min_lr_ratio", "linear or cosine"),
    ([GAE, "critic.optim.lr_scheduler_type=wavy"], "critic.optim.lr_scheduler_type", "no choice"),
    ([GAE, "algorithm.lam=1.5"], "algorithm.lam", "at most 1"),
    (["algorithm.use_kl_in_reward=true"], "algorithm.use_kl_in_reward", "whole episodes' rewards"),
    ([GAE, "algorithm.kl_ctrl.kl_coef=0.1"], "algorithm.kl_ctrl.kl_coef", "use_kl_in_reward=false"),
    ([GAE, "algorithm.kl_penalty=k2"], "algorithm.kl_penalty", "use_kl_in_reward=false"),
    (["algorithm.lam=0.9"], "algorithm.lam", "no effect"),
    (["algorithm.gamma=0.9"], "algorithm.gamma", "no effect"),
    (["algorithm.adv_estimator=rloo", "algorithm.gamma=0.9"], "algorithm.gamma", "no effect"),
    (["algorithm.adv_estimator=rloo", "psrl.rollout_n=1"], "psrl.rollout_n", "at least 2"),
    ([GAE, "psrl.rollout_n=1", "algorithm.filter_groups.enable=true"], "algorithm.filter_groups.enable", "every group"),
    ([GAE, "algorithm.norm_adv_by_std_in_grpo=false"], "algorithm.norm_adv_by_std_in_grpo", "no effect"),
    ([GSPO, f"{ACTOR}.clip_ratio_c=5"], f"{ACTOR}.clip_ratio_c", "no effect"),
    ([f"{ACTOR}.policy_loss=cispo", f"{ACTOR}.clip_ratio_c=5"], f"{ACTOR}.clip_ratio_c", "no effect"),
    ([GSPO, RECOMPUTE], f"{ACTOR}.policy_loss", "the ratio is 1"),
    ([f"{ACTOR}.loss_scale_factor=100"], f"{ACTOR}.loss_scale_factor", "no effect"),
    ([f"{ACTOR}.loss_agg_mode=seq_sum"], f"{ACTOR}.loss_scale_factor", "divides by it"),
    ([f"{ACTOR}.kl_loss_type=k2+", f"{ACTOR}.use_kl_loss=true"], f"{ACTOR}.kl_loss_type", "k3+"),
    (
        ["algorithm.adv_estimator=mt_grpo", "gen_actor_rollout_ref.rollout.agent.default_agent_loop=mini_swe_agent"],
        "algorithm.adv_estimator",
        "branches",
    ),
]

PUBLISHED = {
    "GRPO": [f"{ACTOR}.loss_agg_mode=seq_mean", f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.04"],
    "Dr. GRPO": ["algorithm.norm_adv_by_std_in_grpo=false", f"{ACTOR}.loss_agg_mode=seq_sum", f"{ACTOR}.loss_scale_factor=512"],
    "DAPO": [f"{ACTOR}.clip_ratio_high=0.28", "algorithm.filter_groups.enable=true", "reward.overlong_buffer.enable=true",
             "reward.overlong_buffer.max_sampled_tokens=512", "reward.overlong_buffer.len=128"],
    "RLOO": ["algorithm.adv_estimator=rloo"],
    "REINFORCE++": ["algorithm.adv_estimator=reinforce_plus_plus", "psrl.rollout_n=1", "algorithm.use_kl_in_reward=true"],
    "REINFORCE++ baseline": ["algorithm.adv_estimator=reinforce_plus_plus_baseline", f"{ACTOR}.use_kl_loss=true",
                             f"{ACTOR}.kl_loss_type=k2"],
    "PPO": [GAE, "algorithm.lam=0.95", f"{ACTOR}.ppo_epochs=4", "psrl.rollout_n=1", "trainer.critic_warmup=2", "critic.optim.lr=1e-4"],
    "GSPO": [GSPO, f"{ACTOR}.clip_ratio_low=3e-4", f"{ACTOR}.clip_ratio_high=4e-4", f"{ACTOR}.loss_agg_mode=seq_mean"],
    "CISPO": [f"{ACTOR}.policy_loss=cispo", f"{ACTOR}.clip_ratio_low=1", f"{ACTOR}.clip_ratio_high=0.28"],
    "steps": ["algorithm.adv_estimator=step_return", "algorithm.gamma=0.95"],
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path):
    return str(write_recipe(tmp_path))


@pytest.mark.parametrize(("overrides", "key", "words"), WRONG, ids=lambda value: " ".join(value) if isinstance(value, list) else None)
def test_what_does_not_fit_is_refused_with_its_key(recipe, overrides, key, words):
    with pytest.raises(ConfigError) as refused:
        load_config(recipe, overrides)
    assert refused.value.key == key
    assert words in str(refused.value)


@pytest.mark.parametrize("overrides", PUBLISHED.values(), ids=PUBLISHED)
def test_what_is_published_is_accepted(recipe, overrides):
    load_config(recipe, overrides)


def test_the_checks_know_the_names_that_are_registered():
    assert advantage_estimators.names == ESTIMATORS
    assert policy_losses.names == LOSSES


def test_an_estimator_of_the_users_own_may_read_whatever_it_wants(recipe):
    load_config(recipe, ["algorithm.adv_estimator=my_package.Mine", "algorithm.gamma=0.5", "critic.optim.lr=1e-4"])
