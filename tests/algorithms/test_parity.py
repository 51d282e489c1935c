"""Every algorithm that verl has too gives verl's numbers on the same tensors; the table in docs/algorithms.md says what was compared."""

from pathlib import Path

import numpy as np
import pytest
import torch
from batches import random_episodes
from verl_release import verl_module

from psrl.algorithms.advantages import advantage_estimators
from psrl.algorithms.aggregate import AggregationMode, count, raw_weights
from psrl.algorithms.kl import kl_estimator
from psrl.algorithms.logprobs import chosen_logprobs
from psrl.algorithms.losses import LossInputs, policy_losses
from psrl.algorithms.losses.value import clipped_value_loss
from psrl.config.actor import ActorConfig
from psrl.config.algorithm import AlgorithmConfig

TOLERANCE = 1e-6
DOCS = Path(__file__).parents[2] / "docs" / "algorithms.md"
LENGTH = 16
AGGREGATIONS = {
    AggregationMode.TOKEN_MEAN: "token-mean",
    AggregationMode.SEQ_MEAN: "seq-mean-token-mean",
    AggregationMode.SEQ_SUM: "seq-mean-token-sum-norm",
}
ADVANTAGES = {
    "grpo": ("compute_grpo_outcome_advantage", {}),
    "grpo, norm_adv_by_std_in_grpo=false (Dr. GRPO)": ("compute_grpo_outcome_advantage", {"norm_adv_by_std_in_grpo": False}),
    "rloo": ("compute_rloo_outcome_advantage", {}),
    "reinforce_plus_plus": ("compute_reinforce_plus_plus_outcome_advantage", {"gamma": 0.97}),
    "reinforce_plus_plus_baseline": ("compute_reinforce_plus_plus_baseline_outcome_advantage", {}),
    "gae": ("compute_gae_advantage_return", {"gamma": 0.97, "lam": 0.9}),
}
LOSSES = {
    "ppo_clip": ("compute_policy_loss_vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}),
    "ppo_clip, clip_ratio_high=0.28 (DAPO)": ("compute_policy_loss_vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}),
    "gspo": ("compute_policy_loss_gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}),
    "cispo": ("compute_policy_loss_cispo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}),
    "reinforce": ("compute_policy_loss_reinforce", {}),
}
KL_ESTIMATORS = ("k1", "k2", "k3", "k1+", "k3+")


def core_algos():
    return verl_module("verl.trainer.ppo.core_algos")


def largest(*pairs):
    return max(float((ours.detach().double() - theirs.detach().double()).abs().max()) for ours, theirs in pairs)


def gradient(value, leaf):
    return torch.autograd.grad(value, leaf, retain_graph=True)[0]


def advantage_difference(name):
    function, options = ADVANTAGES[name]
    episodes = random_episodes()
    rewards, mask = episodes.padded([each["rewards"] for each in episodes.columns]), episodes.mask
    estimates = advantage_estimators.resolve(name.split(",")[0])().estimate(episodes.batch, AlgorithmConfig(**options))
    spread = [each.expand(len(m)) * m for each, m in zip(estimates.advantages, episodes.masks, strict=True)]
    arguments = {"token_level_rewards": rewards.clone(), "response_mask": mask}
    if name == "gae":
        arguments |= {"values": episodes.scattered(episodes.values), **options}
    elif name == "reinforce_plus_plus":
        arguments["config"] = verl_module("verl.trainer.config").AlgoConfig(**options)
    else:
        arguments |= {"index": np.array(episodes.groups), **options}
    advantages, returns = getattr(core_algos(), function)(**arguments)
    pairs = [(episodes.padded(spread), advantages * mask)]
    if name == "gae":
        pairs.append((episodes.scattered(estimates.returns), returns * mask))
    return largest(*pairs)


def loss_differences(name):
    """(of values, of gradients) over all aggregations."""
    function, clips = LOSSES[name]
    episodes = random_episodes(seed=3)
    generator = torch.Generator().manual_seed(5)
    num = int(episodes.mask.sum())
    old_N = -torch.rand(num, generator=generator, dtype=torch.float64) * 3
    logprobs_N = (old_N + 0.4 * torch.randn(num, generator=generator, dtype=torch.float64)).requires_grad_()
    if name == "gspo":
        logprobs_N = (old_N + 1e-3 * torch.randn(num, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages_N = torch.randn(num, generator=generator, dtype=torch.float64)
    settings = ActorConfig(policy_loss=name.split(",")[0], **clips)
    inputs = LossInputs(logprobs=logprobs_N, old_logprobs=old_N, rollout_logprobs=old_N, advantages=advantages_N, rows=episodes.rows)
    outputs = policy_losses.resolve(settings.policy_loss)(inputs, settings)
    theirs = {"log_prob": logprobs_N, "old_log_prob": old_N, "advantages": advantages_N}
    theirs = {key: episodes.scattered(episodes.split(values)) for key, values in theirs.items()}
    if name == "reinforce":
        theirs["rollout_log_prob"] = theirs.pop("old_log_prob")
    actor = verl_module("verl.workers.config").ActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, **clips)
    actor.global_batch_info["loss_scale_factor"] = LENGTH
    values, gradients = [], []
    for mode, verl_mode in AGGREGATIONS.items():
        weights = [raw_weights(mode, torch.zeros(int(mask.sum())), length=LENGTH) for mask in episodes.masks]
        ours = (outputs.values * torch.cat(weights)).sum() / sum(count(mode, each) for each in weights)
        loss, _ = getattr(core_algos(), function)(**theirs, response_mask=episodes.mask, loss_agg_mode=verl_mode, config=actor)
        values.append((ours, loss))
        gradients.append((gradient(ours, logprobs_N), gradient(loss, logprobs_N)))
    return largest(*values), largest(*gradients)


def value_loss_differences():
    episodes = random_episodes(seed=4)
    generator = torch.Generator().manual_seed(6)
    old_N = torch.cat(episodes.values).double()
    values_N = (old_N + torch.randn(len(old_N), generator=generator, dtype=torch.float64)).requires_grad_()
    returns_N = torch.randn(len(old_N), generator=generator, dtype=torch.float64)
    ours = clipped_value_loss(values_N, old_N, returns_N, cliprange_value=0.5).values.mean()
    padded = [episodes.scattered(episodes.split(each)) for each in (values_N, returns_N, old_N)]
    theirs, _ = core_algos().compute_value_loss(*padded, episodes.mask, 0.5)
    return largest((ours, theirs)), largest((gradient(ours, values_N), gradient(theirs, values_N)))


def kl_differences(name):
    generator = torch.Generator().manual_seed(7)
    logprobs_N = (-3 * torch.rand(200, generator=generator, dtype=torch.float64)).requires_grad_()
    # Within +-2: verl holds k3 at 10, which log ratios from 2.6 on reach; psrl does not.
    ref_N = logprobs_N.detach() + torch.randn(200, generator=generator, dtype=torch.float64).clamp(-2, 2)
    ours, theirs = kl_estimator(name)(logprobs_N, ref_N), core_algos().kl_penalty(logprobs_N, ref_N, name)
    return largest((ours, theirs)), largest((gradient(ours.sum(), logprobs_N), gradient(theirs.sum(), logprobs_N)))


def entropy_differences():
    generator = torch.Generator().manual_seed(8)
    logits_NV = torch.randn(12, 32, generator=generator).requires_grad_()
    chosen, eye = torch.zeros(12, dtype=torch.int64), torch.eye(32)
    _, ours = chosen_logprobs(logits_NV, eye, chosen, torch.ones(12), entropy_needs_grad=True)
    theirs = core_algos().compute_entropy_loss(logits_NV[None], torch.ones(1, 12))
    return largest((ours.mean(), theirs)), largest((gradient(ours.mean(), logits_NV), gradient(theirs, logits_NV)))


def measured():
    """(kind, name, verl's function, difference of values, of gradients or None), one row for each algorithm."""
    rows = [("advantage", name, ADVANTAGES[name][0], advantage_difference(name), None) for name in ADVANTAGES]
    rows += [("policy loss", name, LOSSES[name][0], *loss_differences(name)) for name in LOSSES]
    rows.append(("value loss", "critic.cliprange_value", "compute_value_loss", *value_loss_differences()))
    rows += [("KL", name, "kl_penalty", *kl_differences(name)) for name in KL_ESTIMATORS]
    rows.append(("entropy", "actor.entropy_coeff", "compute_entropy_loss", *entropy_differences()))
    return rows


def table(rows):
    lines = ["| part | psrl | verl's function | values agree to | gradients agree to |", "|---|---|---|---|---|"]
    lines += [f"| {kind} | `{name}` | `{function}` | {shown(value)} | {shown(slope)} |" for kind, name, function, value, slope in rows]
    return "\n".join(lines)


def shown(difference):
    if difference is None:
        return "-"
    return f"{TOLERANCE:g}" if difference <= TOLERANCE else f"only {difference:.0e}"


@pytest.fixture(scope="module")
def rows():
    return measured()


def test_every_algorithm_agrees_with_verls_release_to_a_millionth(rows):
    assert len(rows) == 18
    worst = {f"{kind} {name}": max(value, slope or 0.0) for kind, name, _, value, slope in rows}
    assert {name: each for name, each in worst.items() if not each <= TOLERANCE} == {}


def test_the_docs_show_the_table_that_was_measured(rows):
    assert table(rows) in DOCS.read_text()


if __name__ == "__main__":
    print(table(measured()))
    print(*measured(), sep="\n")
