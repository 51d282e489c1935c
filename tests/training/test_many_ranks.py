"""FSDP2 on one, two and four gloo ranks: however the model is held, the losses are the same; real processes."""

import pytest
import torch
from rank_processes import run_ranks
from training_builders import largest_difference, make_rank, make_rows, stored
from transformers import AutoModelForCausalLM

from psrl.config.actor import FsdpConfig, OptimConfig

STEPS = 20
RESUMED_AT = 10
OPTIM = OptimConfig(lr=1e-3, weight_decay=0.01, eps=1e-5)
"""Constant rate. eps is above the noise of tiny gradients, which AdamW would blow up to full steps."""
LORA = {"lora_rank": 4, "lora_alpha": 8.0}
LOSSES = ("train/loss/value", "train/grad_norm/mean", "train/entropy/mean", "train/ratio/mean")


def play(rank, world_size, init_method, model_path, folder, numbers, steps, save_at=None, load=False, **actor):
    """Train on eleven rows, an update for every two groups; what was seen and the weights at the end."""
    data_plane, meta = stored(make_rows(model_path)[:-1])
    options = {"optim": OPTIM, "ppo_mini_batch_size": 2, "use_kl_loss": True, "kl_loss_coef": 0.1} | actor
    trainer = make_rank(model_path, data_plane, rank=rank, world_size=world_size, init_method=init_method, model=numbers, **options)
    if load:
        trainer.load(f"{folder}/checkpoint")
    seen = []
    for step in range(steps):
        metrics = trainer.train_step(meta, version=0)
        seen.append([metrics[name] for name in LOSSES])
        if step + 1 == save_at:
            trainer.save(f"{folder}/checkpoint")
    drawn = torch.rand(3)
    tensors = trainer.named_full_tensors()
    trainer.close()
    return {"losses": torch.tensor(seen, dtype=torch.float64), "tensors": tensors, "drawn": drawn}


def play_as(rank, world_size, init_method, model_path, folder, numbers, options):
    return play(rank, world_size, init_method, model_path, folder, numbers, **options)


def trained(tiny_model, folder, world_size, numbers=None, **options):
    """Rank 0's result, after a look that all ranks saw and hold the same."""
    options = {"steps": STEPS} | options
    if world_size == 1:
        return play(0, 1, "", str(tiny_model), str(folder), numbers, **options)
    name = f"{world_size}-{len(list(folder.glob('ranks-*')))}"
    results = run_ranks(world_size, folder / f"ranks-{name}", play_as, str(tiny_model), str(folder), numbers, options)
    for other in results[1:]:
        assert torch.equal(other["losses"], results[0]["losses"])
        assert largest_difference(other["tensors"], results[0]["tensors"]) == 0.0
    return results[0]


def furthest(one, other):
    return float((one["losses"] - other["losses"]).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [None, LORA], ids=["all weights", "adapter"])
def test_one_two_and_four_ranks_see_the_same_losses_over_twenty_steps(tiny_model, tmp_path, numbers):
    one = trained(tiny_model, tmp_path, 1, numbers)
    assert float((one["losses"][0] - one["losses"][-1]).abs().max()) > 1e-2, "the model has learnt, so differences could show"
    for world_size in (2, 4):
        several = trained(tiny_model, tmp_path, world_size, numbers)
        assert furthest(one, several) < 1e-5, world_size
        assert largest_difference(one["tensors"], several["tensors"]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(
    "actor",
    [
        {"fsdp_config": FsdpConfig(fsdp_size=2)},
        {"fsdp_config": FsdpConfig(fsdp_size=1), "ppo_max_token_len_per_gpu": 32},
        {"fsdp_config": FsdpConfig(reshard_after_forward=False)},
        {"gradient_checkpointing": True, "ppo_max_token_len_per_gpu": 32},
    ],
    ids=["two copies of two parts", "four copies, several micro-batches", "layers stay whole", "activation checkpointing"],
)
def test_however_four_ranks_hold_the_model_it_learns_the_same(tiny_model, tmp_path, actor):
    one = trained(tiny_model, tmp_path, 1, steps=4)
    assert furthest(one, trained(tiny_model, tmp_path, 4, steps=4, **actor)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [None, LORA], ids=["all weights", "adapter"])
@pytest.mark.parametrize(("saved_by", "resumed_by"), [(2, 4), (4, 1)])
def test_a_checkpoint_goes_on_with_another_number_of_ranks(tiny_model, tmp_path, numbers, saved_by, resumed_by):
    unbroken = trained(tiny_model, tmp_path, saved_by, numbers, save_at=RESUMED_AT)
    resumed = trained(tiny_model, tmp_path, resumed_by, numbers, steps=STEPS - RESUMED_AT, load=True)
    assert float((unbroken["losses"][RESUMED_AT:] - resumed["losses"]).abs().max()) < 1e-5
    assert largest_difference(unbroken["tensors"], resumed["tensors"]) < 1e-4
    assert torch.equal(unbroken["drawn"], resumed["drawn"]), "random numbers go on where they were"


@pytest.mark.slow
def test_mixed_precision_computes_in_bfloat16_and_keeps_float32(tiny_model, tmp_path):
    mixed = {"compute_dtype": "bfloat16"}
    exact = trained(tiny_model, tmp_path, 1, steps=4)
    one, two = trained(tiny_model, tmp_path, 1, mixed, steps=4), trained(tiny_model, tmp_path, 2, mixed, steps=4)
    loss, entropy = 0, 2  # a gradient's norm has what many rounded numbers add up to
    for column in (loss, entropy):
        assert 0 < float((exact["losses"] - one["losses"])[:, column].abs().max()) < 2e-2
        assert float((one["losses"] - two["losses"])[:, column].abs().max()) < 2e-2
    start = dict(AutoModelForCausalLM.from_pretrained(tiny_model).named_parameters())
    for tensors in (one["tensors"], two["tensors"]):
        moved = [(tensors[name] - start[name]).abs().max() for name in tensors]
        assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
        assert 0 < max(moved) < 5e-2, "updates smaller than bfloat16's digits are kept"
