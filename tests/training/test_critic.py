"""PPO with a critic, on a real tiny model: what it learns from, what it learns, and that a checkpoint goes on with it."""

import pytest
import torch
from rank_processes import run_ranks
from training_builders import largest_difference, make_rank, make_rows, save_model_with_sliding_windows, stored

from psrl.config.actor import OptimConfig
from psrl.config.critic import CriticConfig, CriticModelConfig, CriticOptimConfig
from psrl.errors import ConfigError
from psrl.training.critic import EXPLAINED_VARIANCE
from psrl.training.packing import MicroBatch
from psrl.training.scoring import RowRef, make_row
from psrl.training.worker import ROW_COLUMNS

GAE = {"adv_estimator": "gae"}


def quick_critic(**settings):
    return CriticConfig(optim=CriticOptimConfig(lr=1e-2, weight_decay=0.0), cliprange_value=10.0, **settings)


@pytest.fixture
def plane_and_meta(rows):
    return stored(rows)


def test_a_new_critic_says_0_so_that_the_returns_are_the_rewards(tiny_model, rows, plane_and_meta):
    plane, meta = plane_and_meta
    metrics = make_rank(tiny_model, plane, algorithm=GAE).train_step(meta, version=0)
    tokens = [(row.tags["num_sampled"], row.tags["reward"]) for row in rows]
    mean = sum(num * reward for num, reward in tokens) / sum(num for num, _ in tokens)
    assert metrics["critic/return/mean"] == pytest.approx(mean, abs=1e-6), "gamma = lam = 1: each token's return is the reward at the end"
    assert metrics["critic/error/mean"] == pytest.approx(mean, abs=1e-6)
    assert metrics[EXPLAINED_VARIANCE] == pytest.approx(0.0, abs=1e-6)


def test_a_critic_learns_to_tell_episodes_apart(tiny_model, plane_and_meta):
    plane, meta = plane_and_meta
    rank = make_rank(tiny_model, plane, algorithm=GAE, critic=quick_critic(ppo_epochs=4), critic_warmup=10)
    explained = [rank.train_step(meta, version=0)[EXPLAINED_VARIANCE] for _ in range(8)]
    assert explained[0] == pytest.approx(0.0, abs=1e-6)
    assert explained[-1] > 0.5


def test_while_the_critic_warms_up_the_policy_stands_still(tiny_model, plane_and_meta):
    plane, meta = plane_and_meta
    rank = make_rank(tiny_model, plane, algorithm=GAE, critic=quick_critic(), critic_warmup=1)
    before = rank.named_full_tensors()
    metrics = rank.train_step(meta, version=0)
    assert largest_difference(before, rank.named_full_tensors()) == 0.0
    assert metrics["critic/grad_norm/mean"] > 0
    assert "train/loss/value" not in metrics
    assert rank.train_step(meta, version=1)["train/updates/count"] == 1.0
    assert largest_difference(before, rank.named_full_tensors()) > 0.0


def test_trajectories_without_a_loss_are_no_part_of_values_or_statistics(tiny_model, rows):
    cut = {**rows[0].tags, "outcome": "max_tokens", "reward": 1000.0}
    marked = [type(rows[0])(key=rows[0].key, tags=cut, columns=rows[0].columns), *rows[1:]]
    plane, meta = stored(marked)
    with_cut = make_rank(tiny_model, plane, algorithm=GAE, mask_truncated=True)
    metrics = with_cut.train_step(meta, version=0)
    plane, meta = stored(rows[1:])
    without = make_rank(tiny_model, plane, algorithm=GAE)
    without.train_step(meta, version=0)
    assert metrics["train/rows_without_loss/count"] == 1
    assert largest_difference(with_cut.named_full_tensors(), without.named_full_tensors()) < 1e-6


def test_a_checkpoint_goes_on_with_critic_and_its_optimizer(tiny_model, plane_and_meta, tmp_path):
    plane, meta = plane_and_meta
    settings = {"algorithm": GAE | {"lam": 0.9}, "optim": OptimConfig(lr=1e-3, weight_decay=0.0)}
    rank = make_rank(tiny_model, plane, critic=quick_critic(), **settings)
    rank.train_step(meta, version=0)
    rank.save(tmp_path / "checkpoint")
    expected = rank.train_step(meta, version=1)
    resumed = make_rank(tiny_model, plane, critic=quick_critic(), **settings)
    resumed.load(tmp_path / "checkpoint")
    metrics = resumed.train_step(meta, version=1)
    for name in ("critic/error/mean", "critic/loss/mean", "critic/grad_norm/mean", "train/grad_norm/mean"):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-5), name
    assert largest_difference(rank.named_full_tensors(), resumed.named_full_tensors()) < 1e-6


def test_any_split_into_micro_batches_teaches_a_critic_the_same(tiny_model, plane_and_meta):
    plane, meta = plane_and_meta
    norms = []
    for size in (32, 4096):
        rank = make_rank(tiny_model, plane, algorithm=GAE, critic=quick_critic(), ppo_max_token_len_per_gpu=size)
        first = rank.train_step(meta, version=0)
        norms.append((first["critic/grad_norm/mean"], rank.train_step(meta, version=1)["critic/loss/mean"]))
    assert torch.allclose(torch.tensor(norms[0]), torch.tensor(norms[1]), rtol=1e-4)


def test_a_critic_keeps_no_more_activations_than_the_policy(tiny_model, plane_and_meta):
    plane, meta = plane_and_meta
    kept = {False: 0, True: 0}
    for is_on in (False, True):
        rank = make_rank(tiny_model, plane, algorithm=GAE, gradient_checkpointing=is_on)
        (columns,) = plane.fetch(meta.keys[:1], ROW_COLUMNS)
        batch = MicroBatch((make_row(RowRef(meta.keys[0], meta.tags[0]["num_tokens"]), columns, 1.0, version=0),))

        def note(tensor, is_on=is_on):
            kept[is_on] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            rank._critic._values_of(batch)
    assert kept[True] < kept[False] / 2


def test_a_critic_whose_layers_cannot_keep_packed_rows_apart_is_refused(tiny_model, plane_and_meta, tmp_path):
    save_model_with_sliding_windows(tmp_path)
    critic = CriticConfig(model=CriticModelConfig(path=str(tmp_path)))
    with pytest.raises(ConfigError, match="use_remove_padding"):
        make_rank(tiny_model, plane_and_meta[0], algorithm=GAE, critic=critic)


def test_the_policys_schedule_ends_with_the_run_though_the_critic_warmed_up(tiny_model, plane_and_meta):
    # 10 steps, 8 of them the critic's alone: of the two that are left the first is at the full rate, the last at min_lr_ratio.
    plane, meta = plane_and_meta
    optim = OptimConfig(lr=1e-3, weight_decay=0.0, lr_scheduler_type="linear", min_lr_ratio=0.25)
    rank = make_rank(tiny_model, plane, algorithm=GAE, critic_warmup=8, optim=optim)
    rates = [rank.train_step(meta, version=version)["train/lr/value"] for version in (8, 9)]
    assert rates == pytest.approx([1e-3, 0.25e-3])


def three_steps(rank, world_size, init_method, model_path, folder):
    """Of PPO on an odd number of rows, so that one rank has fewer; then a checkpoint, and a step after it by a rank that read it."""
    plane, meta = stored(make_rows(model_path)[:-1])
    settings = {"algorithm": GAE | {"lam": 0.9, "gamma": 0.97}, "critic": quick_critic(ppo_epochs=2), "ppo_mini_batch_size": 2}
    trainer = make_rank(model_path, plane, rank=rank, world_size=world_size, init_method=init_method, **settings)
    metrics = [trainer.train_step(meta, version=0) for _ in range(3)]
    trainer.save(f"{folder}/checkpoint-{world_size}")
    metrics.append(trainer.train_step(meta, version=1))
    trainer.load(f"{folder}/checkpoint-{world_size}")
    metrics.append(trainer.train_step(meta, version=1))
    tensors = trainer.named_full_tensors()
    trainer.close()
    return {"metrics": metrics, "tensors": tensors}


@pytest.mark.slow
def test_two_ranks_give_the_values_and_weights_of_one(tiny_model, tmp_path):
    (one,) = run_ranks(1, tmp_path / "one", three_steps, str(tiny_model), str(tmp_path))
    two = run_ranks(2, tmp_path / "two", three_steps, str(tiny_model), str(tmp_path))
    names = (
        "critic/error/mean",
        "critic/loss/mean",
        "critic/grad_norm/mean",
        EXPLAINED_VARIANCE,
        "train/loss/value",
        "train/grad_norm/mean",
    )
    for step in range(5):
        for name in names:
            found = [result["metrics"][step][name] for result in two]
            assert found == pytest.approx([one["metrics"][step][name]] * 2, rel=1e-3, abs=1e-5), f"{name} of step {step}"
    for name in names:
        assert one["metrics"][3][name] == pytest.approx(one["metrics"][4][name], rel=1e-4, abs=1e-6), f"{name} after the checkpoint"
    assert largest_difference(one["tensors"], two[0]["tensors"]) < 1e-4
