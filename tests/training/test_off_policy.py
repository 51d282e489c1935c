"""Data that other weights sampled: the trainer against a plain loop over rows, and what it says of the mismatch."""

import math
import random

import pytest
import torch
from training_builders import largest_difference, make_rank, sampled_elsewhere, stored
from transformers import AutoModelForCausalLM

from psrl.config.actor import OptimConfig
from psrl.errors import TrainingError

SGD_LIKE = OptimConfig(lr=1e-3, weight_decay=0.0, eps=1e-2)
"""AdamW whose eps is larger than the moments: rounding noise of tiny gradients is not blown up to a full step."""
TEMPERATURE = 0.7


def noisy(rows, scale=0.8):
    """Rows whose rollout logprobs are off by up to `scale`, each token by its own."""
    draw = random.Random(5)
    return sampled_elsewhere(rows, lambda _number, positions: torch.tensor([draw.uniform(-scale, scale) for _ in positions]))


def trained(model, rows, *, steps=1, version=0, **options):
    data_plane, meta = stored(rows)
    trainer = make_rank(model, data_plane, **({"optim": SGD_LIKE} | options))
    metrics = [trainer.train_step(meta, version=version) for _ in range(steps)][-1]
    return trainer.named_full_tensors(), metrics


# The same in plain torch: one row after another, every ratio by its definition, nothing of psrl's.


def row_logprobs(model, row):
    ids, mask = row.columns["input_ids"], row.columns["loss_mask"].bool()
    log_probs = torch.log_softmax(model(ids[None]).logits[0, :-1] / TEMPERATURE, -1)
    return log_probs.gather(1, ids[1:, None]).squeeze(1)[mask[1:]]


def group_advantages(rows):
    rewards = torch.tensor([row.tags["reward"] for row in rows])
    return torch.zeros(len(rows)) if rewards.std() == 0 else (rewards - rewards.mean()) / (rewards.std() + 1e-6)


def plain_row_loss(logprobs, old, log_ratio, advantage, *, weigh, keeps, loss):
    """Sum over the row's tokens."""
    ratios = [math.exp(x) for x in log_ratio.tolist()]
    total = 0.0 * logprobs.sum()
    for index, ratio in enumerate(ratios):
        if not keeps(ratio, ratios):
            continue
        if loss == "reinforce":
            value = -advantage * logprobs[index]
        else:
            change = (logprobs[index] - old[index]).exp()
            value = torch.maximum(-advantage * change, -advantage * change.clamp(0.8, 1.2))
            value = torch.minimum(value, -advantage * 3.0) if advantage < 0 else value
        total = total + weigh(ratio, ratios) * value
    return total


def plain_weights(model_path, rows, *, epochs, proximal, weigh, keeps, loss="ppo_clip"):
    """Weights after `epochs` passes over the groups, an update for each group; `proximal`: `start`, `current` or `rollout`."""
    model = AutoModelForCausalLM.from_pretrained(model_path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), eps=1e-2, weight_decay=0.0)
    rollout = {row.key: row.columns["rollout_logprobs"][row.columns["loss_mask"].bool()] for row in rows}
    with torch.no_grad():
        start = {row.key: row_logprobs(model, row) for row in rows}
    groups = [rows[first : first + 4] for first in range(0, len(rows), 4)]
    for _ in range(epochs):
        for group in groups:
            optimizer.zero_grad()
            num_tokens = sum(len(rollout[row.key]) for row in group)
            for row, advantage in zip(group, group_advantages(group), strict=True):
                logprobs = row_logprobs(model, row)
                of_train = start[row.key] if proximal == "start" else logprobs.detach()
                old = of_train if proximal == "start" else rollout[row.key]
                log_ratio = of_train - rollout[row.key]
                value = plain_row_loss(logprobs, old, log_ratio, advantage, weigh=weigh, keeps=keeps, loss=loss)
                (value / num_tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def everything(_ratio, _ratios):
    return True


SEQUENCE = {"rollout_is": "sequence", "rollout_is_threshold": "1.3"}
TOKEN_AND_GEOMETRIC = {
    "rollout_is": "token", "rollout_is_threshold": "1.2", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.1",
}  # fmt: skip
ICEPOP_AND_VETO = {"rollout_is": "token", "rollout_is_threshold": "0.8_1.25", "rollout_token_veto_threshold": 0.5}
CASES = {
    # decoupled PPO, weights of whole trajectories: the product of ratios over both turns
    "decoupled, sequence weights": (
        {"old_logprobs": "recompute", "correction": SEQUENCE},
        {"proximal": "start", "weigh": lambda _r, ratios: min(math.prod(ratios), 1.3), "keeps": everything},
    ),
    "decoupled, token weights and rejection": (
        {"old_logprobs": "recompute", "correction": TOKEN_AND_GEOMETRIC},
        {
            "proximal": "start",
            "weigh": lambda r, _ratios: min(r, 1.2),
            "keeps": lambda _r, ratios: 0.9 <= math.prod(ratios) ** (-1 / len(ratios)) <= 1.1,
        },
    ),
    "decoupled, veto": (
        {"old_logprobs": "recompute", "correction": ICEPOP_AND_VETO},
        {"proximal": "start", "weigh": lambda r, _ratios: r if 0.8 <= r <= 1.25 else 0.0, "keeps": lambda _r, ratios: min(ratios) >= 0.5},
    ),
    "ratio against the rollout, rejection": (
        {"old_logprobs": "rollout", "correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": "0.75_1.5"}},
        {"proximal": "current", "weigh": lambda _r, _ratios: 1.0, "keeps": lambda r, _ratios: 0.75 <= 1 / r <= 1.5},
    ),
    "no ratio, token weights": (
        {"policy_loss": "reinforce", "correction": {"rollout_is": "token", "rollout_is_threshold": "1.2"}},
        {"proximal": "current", "weigh": lambda r, _ratios: min(r, 1.2), "keeps": everything, "loss": "reinforce"},
    ),
}


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_several_updates_of_a_buffer_are_those_of_a_plain_loop(tiny_model, rows, case, epochs):
    options, definition = CASES[case]
    stale = noisy(rows)
    ours, metrics = trained(tiny_model, stale, ppo_mini_batch_size=1, ppo_epochs=epochs, **options)
    expected = plain_weights(tiny_model, stale, epochs=epochs, **definition)
    assert metrics["train/updates/count"] == 3 * epochs
    assert largest_difference(ours, expected) < 1e-6
    uncorrected, _ = trained(tiny_model, stale, ppo_mini_batch_size=1, ppo_epochs=epochs, **(options | {"correction": {}}))
    assert largest_difference(uncorrected, expected) > 1e-5, "the correction would be seen if it were wrong"


def test_one_update_needs_no_second_forward_pass_to_be_the_same(tiny_model, rows):
    options, definition = CASES["decoupled, sequence weights"]
    stale = noisy(rows[:4])
    ours, _ = trained(tiny_model, stale, **options)
    assert largest_difference(ours, plain_weights(tiny_model, stale, epochs=1, **definition)) < 1e-6


@pytest.mark.parametrize("case", CASES)
def test_any_micro_batch_size_gives_the_same_corrected_loss(tiny_model, rows, case):
    options, _ = CASES[case]
    small, small_metrics = trained(tiny_model, noisy(rows), ppo_max_token_len_per_gpu=32, **options)
    large, large_metrics = trained(tiny_model, noisy(rows), **options)
    assert small_metrics["train/loss/value"] == pytest.approx(large_metrics["train/loss/value"], abs=1e-6)
    assert largest_difference(small, large) < 1e-6
    for name, value in small_metrics.items():
        if name.startswith("mismatch/"):
            assert value == pytest.approx(large_metrics[name], rel=1e-4), name


def test_mismatch_is_told_by_version_gap_and_turn_and_only_fresh_tokens_are_compared_on_equal_weights(tiny_model, rows):
    # Buffer 7. Turn 0 was sampled by version 5 with logprobs 0.5 too low, so log r = 0.5: k1 = -0.5, k3 = e^0.5 - 1.5 = 0.148721.
    # Turn 1 by version 7: log r = 0.
    def is_first_turn(number):
        return rows[number].columns["turn_indices"] == 0

    stale = sampled_elsewhere(
        rows,
        lambda number, _positions: torch.where(is_first_turn(number), -0.5, 0.0),
        versions=lambda number, _positions: torch.where(is_first_turn(number), 5, 7),
    )
    _, metrics = trained(tiny_model, stale, version=7)
    num_first = sum(int(is_first_turn(number).sum()) for number in range(len(rows)))
    share = num_first / sum(row.tags["num_sampled"] for row in rows)
    assert metrics["mismatch/kl_k3/mean_gap2"] == pytest.approx(0.148721, abs=1e-5)
    assert metrics["mismatch/kl_k3/mean_gap0"] == pytest.approx(0.0, abs=1e-6)
    assert "mismatch/kl_k3/mean_gap1" not in metrics
    assert metrics["mismatch/kl_k3/mean_turn0"] == pytest.approx(0.148721, abs=1e-5)
    assert metrics["mismatch/kl_k3/mean"] == pytest.approx(0.148721 * share, abs=1e-5)
    assert metrics["mismatch/kl_k1/mean"] == pytest.approx(-0.5 * share, abs=1e-5)
    assert metrics["mismatch/version_gap/max"] == 2
    assert metrics["mismatch/version_gap/mean"] == pytest.approx(2 * share)
    mean, square = 1 + share * (math.exp(0.5) - 1), 1 + share * (math.e - 1)
    assert metrics["mismatch/ratio/mean"] == pytest.approx(mean, rel=1e-5)
    assert metrics["mismatch/ratio/max"] == pytest.approx(math.exp(0.5), rel=1e-5)
    assert metrics["mismatch/ratio/effective_share"] == pytest.approx(mean**2 / square, rel=1e-5)
    assert not any("mean_square" in name for name in metrics)
    assert metrics["train/logprob_gap/max"] < 1e-5
    assert "train/logprob_gap/max_turn0" not in metrics, "turn 0 is older: it says nothing about the engine"


def test_a_buffer_without_fresh_tokens_says_nothing_about_equal_weights(tiny_model, rows):
    stale = sampled_elsewhere(rows, lambda *_: 0.1, versions=lambda _number, positions: torch.full_like(positions, 3))
    _, metrics = trained(tiny_model, stale, version=12)
    assert not any(name.startswith("train/logprob_gap/") for name in metrics)
    assert metrics["mismatch/kl_k3/mean_gap7"] > 0, "gaps of 7 and more share a metric"
    assert metrics["mismatch/version_gap/max"] == 9


def test_tokens_of_a_later_version_than_the_buffers_are_refused_by_row(tiny_model, rows):
    broken = [
        *rows[:5],
        *sampled_elsewhere(rows[5:6], lambda *_: 0.0, versions=lambda _n, positions: torch.full_like(positions, 4)),
        *rows[6:],
    ]
    with pytest.raises(TrainingError, match=r"g1-e1-t0.*\[4\].*version 3"):
        trained(tiny_model, broken, version=3)


def test_weights_and_rejections_are_counted(tiny_model, rows):
    # Row 0: r = e everywhere; row 1: r = 1/e; the others 1. Weights of tokens are cut at 2: e -> 2. token_k1 within 0.5 and 2 rejects
    # both rows whole (1/r = 0.37 and 2.72), the veto at 0.4 the second.
    shifts = {0: -1.0, 1: 1.0}
    stale = sampled_elsewhere(rows, lambda number, _positions: shifts.get(number, 0.0))
    sizes = [row.tags["num_sampled"] for row in rows]
    total = sum(sizes)
    correction = {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": "2.0", "rollout_token_veto_threshold": 0.4}
    _, metrics = trained(tiny_model, stale, old_logprobs="recompute", correction=correction)
    low = math.exp(-1)
    mean = (2 * sizes[0] + low * sizes[1] + total - sizes[0] - sizes[1]) / total
    square = (4 * sizes[0] + low**2 * sizes[1] + total - sizes[0] - sizes[1]) / total
    assert metrics["mismatch/weight/mean"] == pytest.approx(mean, rel=1e-5)
    assert metrics["mismatch/weight/effective_share"] == pytest.approx(mean**2 / square, rel=1e-5)
    assert metrics["mismatch/weight/max"] == 2.0
    assert metrics["mismatch/weight/max_untruncated"] == pytest.approx(math.e, rel=1e-5)
    assert metrics["mismatch/weight/truncated_share"] == pytest.approx(sizes[0] / total)
    assert metrics["mismatch/rejected/token_share"] == pytest.approx((sizes[0] + sizes[1]) / total)
    assert metrics["mismatch/rejected/trajectory_share"] == pytest.approx(2 / 12)
    assert metrics["mismatch/vetoed/trajectory_share"] == pytest.approx(1 / 12)


def test_a_buffer_that_is_rejected_whole_changes_nothing_and_is_no_failure(tiny_model, rows):
    stale = sampled_elsewhere(rows, lambda *_: 3.0)
    correction = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.5_2.0"}
    before = make_rank(tiny_model, stored(rows)[0]).named_full_tensors()
    after, metrics = trained(tiny_model, stale, correction=correction)
    assert metrics["mismatch/rejected/token_share"] == 1.0
    assert metrics["train/loss/value"] == 0.0
    assert largest_difference(before, after) == 0.0


def test_every_row_is_measured_once_where_proximal_logprobs_are_recomputed(tiny_model, rows):
    # 3 groups, one in an update: without recomputing only the first group is still seen by the weights at the start
    shifts = {number: -0.5 for number in range(8, 12)}
    stale = sampled_elsewhere(rows, lambda number, _positions: shifts.get(number, 0.0))
    _, recomputed = trained(tiny_model, stale, old_logprobs="recompute", ppo_mini_batch_size=1, ppo_epochs=2)
    _, rollout = trained(tiny_model, stale, old_logprobs="rollout", ppo_mini_batch_size=1, ppo_epochs=2)
    share = sum(row.tags["num_sampled"] for row in rows[8:]) / sum(row.tags["num_sampled"] for row in rows)
    assert recomputed["mismatch/kl_k1/mean"] == pytest.approx(-0.5 * share, abs=1e-5)
    assert rollout["mismatch/kl_k1/mean"] == pytest.approx(0.0, abs=1e-5)
