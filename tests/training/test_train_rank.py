"""What a training step does to weights and says in metrics, on a real model with rows sampled from it."""

import dataclasses
import math

import pytest
import torch
from torch.distributed.tensor import DTensor
from training_builders import largest_difference, make_rank, make_rows, stored

from psrl.config.actor import FsdpConfig, OptimConfig
from psrl.errors import ConfigError, DataPlaneError, RowTooLongError, TrainingError


def with_tags(row, **tags):
    return dataclasses.replace(row, tags=row.tags | tags)


def with_columns(row, **columns):
    return dataclasses.replace(row, columns=row.columns | columns)


def weights_after(model, rows, *, steps=1, **options):
    data_plane, meta = stored(rows)
    trainer = make_rank(model, data_plane, **options)
    metrics = [trainer.train_step(meta, version=0) for _ in range(steps)][-1]
    return trainer.named_full_tensors(), metrics


def test_engine_and_trainer_agree_before_the_first_update_and_not_after(tiny_model, rows):
    data_plane, meta = stored(rows)
    trainer = make_rank(tiny_model, data_plane)
    first, second = trainer.train_step(meta, version=0), trainer.train_step(meta, version=0)
    for stat in ("max", "mean", "max_turn0", "max_turn1", "mean_turn1"):
        assert first[f"train/logprob_gap/{stat}"] < 1e-5
    assert second["train/logprob_gap/max"] > 1e-4
    assert "train/logprob_gap/max_turn2" not in first
    assert first["train/ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert all(math.isfinite(value) for value in first.values())


def test_the_learning_rate_follows_its_schedule_by_training_step(tiny_model, rows):
    # linear over 10 steps from 1e-3 to 0: the second step is at 1 - 1/9
    _, metrics = weights_after(tiny_model, rows, steps=2)
    assert metrics["train/lr/value"] == pytest.approx(1e-3 * 8 / 9)


def test_counts_are_of_real_tokens(tiny_model, rows):
    _, metrics = weights_after(tiny_model, rows)
    assert metrics["train/tokens/count"] == sum(len(row.columns["input_ids"]) for row in rows)
    assert metrics["train/sampled_tokens/count"] == sum(int(row.columns["loss_mask"].sum()) for row in rows)
    assert metrics["train/rows/count"] == 12


@pytest.mark.parametrize(
    "options",
    [
        {"loss_agg_mode": "token_mean"},
        {"loss_agg_mode": "seq_mean"},
        {"loss_agg_mode": "seq_sum", "loss_scale_factor": 16},
        {"loss_agg_mode": "turn_mean"},
        {"policy_loss": "gspo", "ppo_epochs": 3, "clip_ratio_low": 1e-3, "clip_ratio_high": 1e-3},
        {"policy_loss": "cispo", "ppo_epochs": 3, "clip_ratio_low": 1e-2, "clip_ratio_high": 1e-2},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_any_micro_batch_size_gives_the_same_loss_and_weights(tiny_model, rows, options):
    options = options | {"optim": OptimConfig(lr=1e-3, weight_decay=0.0, eps=1e-2)}
    small, small_metrics = weights_after(tiny_model, rows, ppo_max_token_len_per_gpu=32, **options)
    large, large_metrics = weights_after(tiny_model, rows, ppo_max_token_len_per_gpu=4096, **options)
    if "policy_loss" in options:
        assert 0 < small_metrics["train/clip/fraction"] < 1
    assert small_metrics["train/loss/value"] == pytest.approx(large_metrics["train/loss/value"], abs=1e-6)
    assert small_metrics["train/grad_norm/mean"] == pytest.approx(large_metrics["train/grad_norm/mean"], rel=1e-4)
    assert largest_difference(small, large) < 1e-6


def test_the_first_loss_is_minus_the_mean_advantage_over_sampled_tokens(tiny_model, rows):
    # at ratio 1 each token's loss is -A; a group with mean reward m and deviation s gives its members (r - m) / (s + 1e-6)
    total, count = 0.0, 0
    for group in range(3):
        members = rows[4 * group : 4 * group + 4]
        rewards = torch.tensor([row.tags["reward"] for row in members])
        for row, reward in zip(members, rewards, strict=True):
            advantage = 0.0 if rewards.std() == 0 else float((reward - rewards.mean()) / (rewards.std() + 1e-6))
            total += advantage * row.tags["num_sampled"]
            count += row.tags["num_sampled"]
    _, metrics = weights_after(tiny_model, rows)
    assert metrics["train/loss/value"] == pytest.approx(-total / count, abs=1e-5)


def test_tokens_that_the_policy_did_not_sample_have_no_gradient(tiny_model, rows):
    data_plane, _ = stored(rows)
    trainer = make_rank(tiny_model, data_plane)
    policy = trainer._policy
    states = []

    def keep(_module, _inputs, output):
        output[0].retain_grad()
        states.append(output[0])

    handle = policy.causal_lm.base_model.register_forward_hook(keep)
    row = rows[0].columns
    mask = row["loss_mask"].bool()
    positions = mask.nonzero().squeeze(1)
    logprobs, _ = policy(row["input_ids"][None], positions - 1, row["input_ids"][mask], torch.ones(len(positions)))
    logprobs.sum().backward()
    handle.remove()
    has_gradient = states[0].grad[0].abs().sum(-1) > 0
    assert has_gradient.nonzero().squeeze(1).tolist() == (positions - 1).tolist()


def test_equal_rewards_leave_the_weights_as_they_are(tiny_model):
    rows = make_rows(tiny_model, rewards=[1.0] * 12)
    before = make_rank(tiny_model, stored(rows)[0]).named_full_tensors()
    after, metrics = weights_after(tiny_model, rows)
    assert largest_difference(before, after) == 0.0
    assert metrics["train/rows_with_zero_advantage/count"] == 12
    assert metrics["train/loss/value"] == 0.0


def test_a_truncated_row_has_no_loss_but_stays_in_the_baseline(tiny_model, rows):
    cut = [with_tags(rows[0], outcome="max_tokens"), *rows[1:]]
    masked, metrics = weights_after(tiny_model, cut, mask_truncated=True)
    garbled = [with_columns(cut[0], input_ids=torch.zeros_like(cut[0].columns["input_ids"])), *cut[1:]]
    of_garbled, _ = weights_after(tiny_model, garbled, mask_truncated=True)
    kept, _ = weights_after(tiny_model, cut)
    without, _ = weights_after(tiny_model, rows[1:])
    assert metrics["train/rows_without_loss/count"] == 1
    assert largest_difference(masked, of_garbled) == 0.0
    assert largest_difference(masked, kept) > 1e-6
    assert largest_difference(masked, without) > 1e-6, "its reward no longer counts in the baseline of its group"


def test_a_batch_of_only_truncated_rows_is_refused(tiny_model, rows):
    with pytest.raises(TrainingError, match="none of the 12"):
        weights_after(tiny_model, [with_tags(row, outcome="max_tokens") for row in rows], mask_truncated=True)


def test_mini_batches_are_whole_groups_and_epochs_repeat_them(tiny_model, rows):
    # 3 groups, 2 in an update -> 2 updates an epoch, 2 epochs
    interleaved = [rows[i] for i in (0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11)]
    _, metrics = weights_after(tiny_model, interleaved, ppo_mini_batch_size=2, ppo_epochs=2)
    assert metrics["train/updates/count"] == 4
    assert metrics["train/ratio/max"] > 1.0001


@pytest.mark.parametrize("options", [{}, {"ppo_epochs": 2}])
def test_recomputed_old_logprobs_equal_the_engines_on_the_same_weights(tiny_model, rows, options):
    sgd_like = OptimConfig(lr=1e-3, weight_decay=0.0, eps=1e-2)
    rollout, _ = weights_after(tiny_model, rows, old_logprobs="rollout", optim=sgd_like, **options)
    recomputed, _ = weights_after(tiny_model, rows, old_logprobs="recompute", optim=sgd_like, **options)
    assert largest_difference(rollout, recomputed) < 1e-6


def test_kl_to_the_starting_weights_is_zero_first_and_grows(tiny_model, rows):
    _, first = weights_after(tiny_model, rows, use_kl_loss=True)
    _, third = weights_after(tiny_model, rows, use_kl_loss=True, steps=3)
    assert first["train/ref_kl/mean"] == pytest.approx(0.0, abs=1e-6)
    assert third["train/ref_kl/mean"] > 1e-4


def test_gradient_checkpointing_changes_nothing_but_memory(tiny_model, rows):
    plain, _ = weights_after(tiny_model, rows)
    checkpointed, metrics = weights_after(tiny_model, rows, gradient_checkpointing=True)
    assert largest_difference(plain, checkpointed) < 1e-6
    assert metrics["train/logprob_gap/max"] < 1e-5


def test_weights_that_are_not_finite_stop_the_run_by_name_and_are_not_stepped(tiny_model, rows):
    data_plane, meta = stored(rows)
    trainer = make_rank(tiny_model, data_plane)
    weight = trainer._policy.causal_lm.model.layers[1].mlp.up_proj.weight
    with torch.no_grad():
        weight[0, 0] = math.nan
    before = weight[1].clone()
    with pytest.raises(TrainingError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        trainer.train_step(meta, version=0)
    assert torch.equal(weight[1], before)


def test_an_engine_logprob_that_is_not_finite_is_named_by_its_row(tiny_model, rows):
    broken = rows[3].columns["rollout_logprobs"].clone()
    broken[rows[3].columns["loss_mask"].bool()] = -math.inf
    with pytest.raises(TrainingError, match="g0-e3-t0"):
        weights_after(tiny_model, [*rows[:3], with_columns(rows[3], rollout_logprobs=broken), *rows[4:]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: with_tags(row, num_tokens=3), "columns have"),
        (lambda row: with_tags(row, temperature=0.0), "temperature 0.0"),
        (lambda row: with_columns(row, loss_mask=torch.zeros_like(row.columns["loss_mask"])), "no sampled token"),
    ],
)
def test_rows_that_break_their_promises_are_named(tiny_model, rows, change, message):
    with pytest.raises(TrainingError, match=f"g0-e0-t0.*{message}"):
        weights_after(tiny_model, [change(rows[0]), *rows[1:]])


def test_a_row_longer_than_a_micro_batch_is_refused_not_cut(tiny_model, rows):
    with pytest.raises(RowTooLongError):
        weights_after(tiny_model, rows, ppo_max_token_len_per_gpu=8)


def test_missing_rows_are_the_data_planes_error(tiny_model, rows):
    data_plane, meta = stored(rows)
    trainer = make_rank(tiny_model, data_plane)
    data_plane.clear([rows[2].key])
    with pytest.raises(DataPlaneError, match="g0-e2-t0"):
        trainer.train_step(meta, version=0)


@pytest.mark.parametrize(
    "options",
    [{"old_logprobs": "guess"}, {"policy_loss": "nothing"}, {"loss_agg_mode": "sum"}, {"optim": OptimConfig(lr_scheduler_type="wavy")}],
)
def test_unknown_choices_are_config_errors(tiny_model, rows, options):
    with pytest.raises(ConfigError):
        make_rank(tiny_model, stored(rows)[0], **options)


def test_a_reference_is_whole_only_while_it_scores(tiny_model, rows):
    """FSDP2 would keep it gathered for a backward pass that never comes, beside the policy and in the compute dtype."""
    data_plane, meta = stored(rows)
    options = {"model": {"compute_dtype": "bfloat16"}, "fsdp_config": FsdpConfig(reshard_after_forward=False), "use_kl_loss": True}
    trainer = make_rank(tiny_model, data_plane, **options)
    trainer.train_step(meta, version=0)
    kept = {(isinstance(parameter, DTensor), parameter.dtype) for parameter in trainer._reference_model.parameters()}
    trainer.close()
    assert kept == {(True, torch.float32)}
