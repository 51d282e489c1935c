"""Importance weights, rejection and veto against arithmetic done by hand; the same loss for any split; finite for any input."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.algorithms.aggregate import AggregationMode, count, raw_weights
from psrl.algorithms.correction import RolloutCorrection, bounded, divergences, effective_share
from psrl.algorithms.losses import LossInputs, policy_losses
from psrl.algorithms.rows import Rows
from psrl.config.actor import ActorConfig
from psrl.config.rollout_correction import RS_OPTIONS, RolloutCorrectionConfig, is_bounds, rs_criteria
from psrl.errors import ConfigError

CPU = torch.device("cpu")
# Two trajectories. The first has three tokens with r = 2, 2, 1/2 (product 2, geometric mean 2^(1/3) = 1.26), the second two with
# r = 1/4, 1 (product 1/4, geometric mean 1/2).
RATIOS = [[2.0, 2.0, 0.5], [0.25, 1.0]]


def corrected(ratios=RATIOS, **options):
    log_ratios = torch.tensor([math.log(r) for row in ratios for r in row])
    return RolloutCorrection(RolloutCorrectionConfig(**options))(log_ratios, Rows([len(row) for row in ratios], CPU))


def test_nothing_is_changed_unless_asked_for():
    correction = corrected()
    assert correction.weights.tolist() == [1.0] * 5
    assert correction.keep.tolist() == [True] * 5
    assert correction.vetoed_rows.tolist() == [False, False]


@pytest.mark.parametrize(
    ("level", "threshold", "expected"),
    [
        ("token", "4.0", [2.0, 2.0, 0.5, 0.25, 1.0]),
        ("token", "1.5", [1.5, 1.5, 0.5, 0.25, 1.0]),  # min(r, 1.5): nothing is raised from below
        ("token", "0.4_1.5", [0.0, 0.0, 0.5, 0.0, 1.0]),  # IcePop: 2 and 0.25 are outside
        ("sequence", "4.0", [2.0, 2.0, 2.0, 0.25, 0.25]),  # 2 * 2 / 2 and 1/4 * 1
        ("sequence", "1.5", [1.5, 1.5, 1.5, 0.25, 0.25]),
        ("sequence", "0.5_3.0", [2.0, 2.0, 2.0, 0.0, 0.0]),
    ],
)
def test_truncated_importance_weights_by_hand(level, threshold, expected):
    correction = corrected(rollout_is=level, rollout_is_threshold=threshold)
    assert correction.weights.tolist() == pytest.approx(expected, rel=1e-6)
    assert correction.keep.all(), "weights reject nothing"


def test_a_weight_of_a_whole_trajectory_is_of_all_its_turns():
    # Three turns of two tokens with r = 1.1 each: 1.1^6 = 1.771561, whatever the turn
    correction = corrected([[1.1] * 6], rollout_is="sequence", rollout_is_threshold="10")
    assert correction.weights.tolist() == pytest.approx([1.771561] * 6, rel=1e-6)


@pytest.mark.parametrize(
    ("criterion", "threshold", "expected"),
    [
        # exp(k1) = 1/r per token: 0.5, 0.5, 2 | 4, 1
        ("token_k1", "0.6_3.0", [False, False, True, False, True]),
        ("token_k1", "2.5", [True, True, True, False, True]),  # alone, 2.5 means 0.4_2.5
        # over trajectories: 1/2 | 4
        ("seq_sum_k1", "0.6_3.0", [False, False, False, False, False]),
        ("seq_sum_k1", "0.4_3.0", [True, True, True, False, False]),
        # geometric means: 2^(-1/3) = 0.7937 | 2
        ("seq_mean_k1", "0.79_1.9", [True, True, True, False, False]),
        ("seq_mean_k1", "0.8_2.1", [False, False, False, True, True]),
        # k2 = (log r)^2 / 2: 0.2402, 0.2402, 0.2402 | 0.9609, 0
        ("token_k2", "0.25", [True, True, True, False, True]),
        ("seq_sum_k2", "0.8", [True, True, True, False, False]),  # 0.7207 | 0.9609
        ("seq_mean_k2", "0.3", [True, True, True, False, False]),  # 0.2402 | 0.4805
        ("seq_max_k2", "0.3", [True, True, True, False, False]),  # 0.2402 | 0.9609
        # k3 = r - 1 - log r: 0.3069, 0.3069, 0.1931 | 0.6363, 0
        ("token_k3", "0.31", [True, True, True, False, True]),
        ("token_k3", "0.3", [False, False, True, False, True]),
        ("seq_sum_k3", "0.7", [False, False, False, True, True]),  # 0.8069 | 0.6363
        ("seq_mean_k3", "0.3", [True, True, True, False, False]),  # 0.2690 | 0.3182
        ("seq_max_k3", "0.6", [True, True, True, False, False]),  # 0.3069 | 0.6363
    ],
)
def test_rejection_by_hand(criterion, threshold, expected):
    correction = corrected(rollout_rs=criterion, rollout_rs_threshold=threshold)
    assert correction.keep.tolist() == expected
    assert correction.weights.tolist() == [1.0] * 5, "rejection weighs nothing"


def test_all_of_several_criteria_must_hold():
    # token_k1 within 0.6 and 3 leaves tokens 2 and 4, seq_mean_k2 up to 0.3 the first trajectory
    correction = corrected(rollout_rs="token_k1, seq_mean_k2", rollout_rs_threshold="0.6_3.0, 0.3")
    assert correction.keep.tolist() == [False, False, True, False, False]


def test_one_catastrophic_token_vetoes_its_whole_trajectory_and_no_other():
    ratios = [[1.0, 1.0], [1.0, 9e-5, 1.0], [1.1e-4]]
    correction = corrected(ratios, rollout_token_veto_threshold=1e-4)
    assert correction.vetoed_rows.tolist() == [False, True, False]
    assert correction.keep.tolist() == [True, True, False, False, False, True]


def test_divergences_by_hand():
    # r = 2: log r = 0.693147
    log_ratio = torch.tensor([math.log(2)])
    values = [float(divergences(log_ratio, k)) for k in ("k1", "k2", "k3")]
    assert values == pytest.approx([-0.693147, 0.240227, 0.306853], abs=1e-6)


def test_effective_share_by_hand():
    assert effective_share(4 / 3, 2.0) == pytest.approx(8 / 9)  # w = 1, 1, 2: (16 / 9) / 2
    assert effective_share(1.0, 1.0) == 1.0
    assert effective_share(0.25, 0.25) == pytest.approx(0.25)  # w = 1, 0, 0, 0: one sample of four
    assert effective_share(0.0, 0.0) == 0.0


any_float = st.floats(allow_nan=True, allow_infinity=True, width=32)
any_correction = st.builds(
    RolloutCorrectionConfig,
    rollout_is=st.sampled_from([None, "token", "sequence"]),
    rollout_is_threshold=st.sampled_from(["2.0", "0.5_5.0", "1e9"]),
    rollout_rs=st.sampled_from([None, *RS_OPTIONS]),
    rollout_rs_threshold=st.just("2.0"),
    rollout_token_veto_threshold=st.sampled_from([None, 1e-4]),
)


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.lists(any_float, min_size=1, max_size=6), max_size=5), options=any_correction)
def test_any_input_gives_finite_weights(values, options):
    log_ratio = torch.tensor([v for row in values for v in row], dtype=torch.float32)
    correction = RolloutCorrection(options)(log_ratio, Rows([len(row) for row in values], CPU))
    assert torch.isfinite(correction.weights).all()
    assert torch.isfinite(correction.raw_weights).all()
    assert (correction.weights >= 0).all()
    assert all(torch.isfinite(divergences(bounded(log_ratio), k)).all() for k in ("k1", "k2", "k3"))


def loss_of(rows, mode, options, actor, total):
    """Sum over rows of (logprobs, proximal, rollout, advantages, turns), as the trainer puts it together."""
    logprobs, proximal, rollout, advantages = (torch.cat([row[index] for row in rows]) for index in range(4))
    layout = Rows([len(row[0]) for row in rows], CPU)
    inputs = LossInputs(logprobs=logprobs, old_logprobs=proximal, rollout_logprobs=rollout, advantages=advantages, rows=layout)
    correction = RolloutCorrection(options)(proximal - rollout, layout)
    weights = torch.cat([raw_weights(mode, row[4], length=8) for row in rows])
    values = policy_losses.resolve(actor.policy_loss)(inputs, actor).values
    return (values * correction.weights * weights * correction.keep).sum() / total


rows_of_turns = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=7).map(sorted), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(
    mode=st.sampled_from(list(AggregationMode)), turns=rows_of_turns, options=any_correction,
    policy_loss=st.sampled_from(policy_losses.names), data=st.data(),
)  # fmt: skip
def test_any_split_gives_the_same_corrected_loss_and_gradient(mode, turns, options, policy_loss, data):
    sizes, actor = [len(row) for row in turns], ActorConfig(policy_loss=policy_loss)
    generator = torch.Generator().manual_seed(len(turns))
    proximal, drift, mismatch, advantages = torch.randn(4, sum(sizes), generator=generator)
    fixed = [part.split(sizes) for part in (proximal, proximal - mismatch, advantages)]
    total = sum(count(mode, raw_weights(mode, torch.tensor(row), length=8)) for row in turns)

    def rows_from(logprobs):
        parts = logprobs.split(sizes)
        return [(parts[i], fixed[0][i], fixed[1][i], fixed[2][i], torch.tensor(turns[i])) for i in range(len(turns))]

    whole = (proximal + 0.3 * drift).requires_grad_()
    loss = loss_of(rows_from(whole), mode, options, actor, total)
    loss.backward()
    split = whole.detach().clone().requires_grad_()
    rows, bin_of = rows_from(split), [data.draw(st.integers(0, 3)) for _ in turns]
    parts = [[row for row, number in zip(rows, bin_of, strict=True) if number == wanted] for wanted in range(4)]
    split_loss = sum(loss_of(part, mode, options, actor, total) for part in parts if part)
    split_loss.backward()
    assert float(split_loss.detach()) == pytest.approx(float(loss.detach()), rel=1e-5, abs=1e-6)
    assert torch.allclose(split.grad, whole.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("threshold", "expected"), [("2.0", (None, 2.0)), ("3", (None, 3.0)), ("0.5_5.0", (0.5, 5.0)), ("1.0_1.0", (1.0, 1.0))]
)
def test_importance_thresholds_are_read(threshold, expected):
    assert is_bounds(threshold) == expected


@pytest.mark.parametrize("threshold", ["0.52", "two", "", "0.5_2.0_3.0", "2.0_0.5", "1.5_2.0", "0_2.0", "nan", "inf", "0.5_inf"])
def test_importance_thresholds_that_make_no_sense_are_config_errors(threshold):
    with pytest.raises(ConfigError, match="rollout_is_threshold"):
        is_bounds(threshold)


@pytest.mark.parametrize(
    ("criteria", "threshold", "message"),
    [
        ("token", "2.0", "no criterion"),
        ("seq_max_k1", "2.0", "no criterion"),
        ("token_k1,token_k1", "2.0", "twice"),
        ("token_k1", None, "needs thresholds"),
        ("token_k1,seq_sum_k1", "2.0,2.0,2.0", "3 entries for the 2 criteria"),
        ("token_k1", "0.52", "agree on"),  # what YAML makes of an unquoted 0.5_2
        ("token_k1", "1.1_2.0", "agree on"),
        ("token_k1", "0", "agree on"),
        ("token_k3", "0.5_2.0", "one positive upper bound"),
        ("token_k2", "-1", "one positive upper bound"),
        ("token_k1", "a_b", "neither a number"),
    ],
)
def test_criteria_that_make_no_sense_are_config_errors(criteria, threshold, message):
    with pytest.raises(ConfigError, match=message):
        rs_criteria(criteria, threshold)
