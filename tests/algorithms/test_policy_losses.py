"""Losses, KL estimates and truncation against arithmetic done by hand."""

import math

import pytest
import torch

from psrl.algorithms.kl import kl_estimator
from psrl.algorithms.losses import LossInputs, policy_losses
from psrl.algorithms.rows import Rows
from psrl.algorithms.truncation import has_loss
from psrl.config.actor import ActorConfig
from psrl.errors import ConfigError

SETTINGS = ActorConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)


def one_row(size):
    return Rows([size], torch.device("cpu"))


def clipped(advantages, ratios):
    logprobs = torch.tensor([math.log(r) for r in ratios], requires_grad=True)
    zeros = torch.zeros(len(ratios))
    inputs = LossInputs(
        logprobs=logprobs, old_logprobs=zeros, rollout_logprobs=zeros, advantages=torch.tensor(advantages), rows=one_row(len(ratios))
    )
    outputs = policy_losses.resolve("ppo_clip")(inputs, SETTINGS)
    outputs.values.sum().backward()
    return outputs, logprobs.grad


def test_ppo_clip_by_hand():
    # A = 1:  r 1.0 -> -1;    r 1.5 -> max(-1.5, -1.28) = -1.28;  r 0.5 -> max(-0.5, -0.8) = -0.5 (pessimistic: not clipped)
    # A = -1: r 1.0 -> 1;     r 0.5 -> max(0.5, 0.8) = 0.8;       r 2.0 -> max(2, 1.28) = 2;  r 5 -> min(5, 3) = 3 (dual clip)
    outputs, _ = clipped([1.0, 1.0, 1.0, -1.0, -1.0, -1.0, -1.0], [1.0, 1.5, 0.5, 1.0, 0.5, 2.0, 5.0])
    assert outputs.values.tolist() == pytest.approx([-1.0, -1.28, -0.5, 1.0, 0.8, 2.0, 3.0], rel=1e-5)
    assert outputs.means["clip/fraction"].tolist() == [0, 1, 0, 0, 1, 0, 0]
    assert outputs.means["dual_clip/fraction"].tolist() == [0, 0, 0, 0, 0, 0, 1]


def test_clipped_tokens_have_no_gradient_and_the_others_minus_advantage_times_ratio():
    # d(-A r)/d logprob = -A r: -1, 0 (clipped high), -0.5, 2, 0 (dual clip)
    _, gradient = clipped([1.0, 1.0, 1.0, -1.0, -1.0], [1.0, 1.5, 0.5, 2.0, 5.0])
    assert gradient.tolist() == pytest.approx([-1.0, 0.0, -0.5, 2.0, 0.0], rel=1e-5)


def test_a_hopeless_ratio_stays_finite():
    inputs = LossInputs(
        logprobs=torch.tensor([0.0]),
        old_logprobs=torch.tensor([-1e4]),
        rollout_logprobs=torch.zeros(1),
        advantages=torch.tensor([-1.0]),
        rows=one_row(1),
    )
    assert policy_losses.resolve("ppo_clip")(inputs, SETTINGS).values.tolist() == [3.0]


@pytest.mark.parametrize(
    ("name", "expected"),
    # policy 0.5, reference 0.25: d = ln 2 = 0.693147; k1 = d; k2 = d^2 / 2 = 0.240227; k3 = 0.5 - 1 + d = 0.193147
    [("k1", 0.693147), ("k2", 0.240227), ("k3", 0.193147)],
)
def test_kl_estimates_by_hand(name, expected):
    kl = kl_estimator(name)(torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)]))
    assert float(kl) == pytest.approx(expected, abs=1e-6)


def test_an_unknown_kl_estimate_is_a_config_error():
    with pytest.raises(ConfigError, match="k1, k2, k3"):
        kl_estimator("k4")


@pytest.mark.parametrize(
    ("outcome", "mask_truncated", "expected"),
    [
        ("max_tokens", True, False),
        ("max_tokens", False, True),
        ("finished", True, True),
        ("max_turns", True, True),
        ("timeout", True, True),
    ],
)
def test_only_trajectories_cut_by_a_token_limit_are_masked_and_only_when_asked(outcome, mask_truncated, expected):
    assert has_loss({"outcome": outcome}, mask_truncated=mask_truncated) is expected


def test_reinforce_by_hand():
    # A = 2, log pi = -0.5 -> 1, gradient -2; A = -1, log pi = -3 -> -3, gradient 1
    logprobs = torch.tensor([-0.5, -3.0], requires_grad=True)
    zeros = torch.zeros(2)
    inputs = LossInputs(
        logprobs=logprobs, old_logprobs=zeros, rollout_logprobs=zeros, advantages=torch.tensor([2.0, -1.0]), rows=one_row(2)
    )
    values = policy_losses.resolve("reinforce")(inputs, SETTINGS).values
    values.sum().backward()
    assert values.tolist() == [1.0, -3.0]
    assert logprobs.grad.tolist() == [-2.0, 1.0]
