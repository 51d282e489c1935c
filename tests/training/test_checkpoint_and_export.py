"""A run that stops and goes on equals one that never stopped; what is saved can be read by others."""

import random

import numpy as np
import pytest
import torch
from training_builders import largest_difference, make_rank, stored
from transformers import AutoModelForCausalLM

from psrl.config.actor import OptimConfig
from psrl.config.model import ModelConfig
from psrl.errors import CheckpointError, ConfigError
from psrl.training.checkpoint import rng_file_of
from psrl.training.model import load_model


def test_the_third_step_after_a_resume_is_the_third_step_of_an_unbroken_run(tiny_model, rows, tmp_path):
    data_plane, meta = stored(rows)
    unbroken = make_rank(tiny_model, data_plane)
    for _ in range(2):
        unbroken.train_step(meta, version=0)
    unbroken.save(tmp_path / "checkpoint")
    expected = unbroken.train_step(meta, version=0)

    resumed = make_rank(tiny_model, data_plane)
    resumed.load(tmp_path / "checkpoint")
    metrics = resumed.train_step(meta, version=0)
    for name in ("train/loss/value", "train/grad_norm/mean", "train/lr/value"):
        assert metrics[name] == expected[name]
    assert largest_difference(resumed.named_full_tensors(), unbroken.named_full_tensors()) == 0.0


def test_saving_does_not_change_the_run_and_replaces_an_older_checkpoint(tiny_model, rows, tmp_path):
    data_plane, meta = stored(rows)
    saving, silent = make_rank(tiny_model, data_plane), make_rank(tiny_model, data_plane)
    for _ in range(2):
        saving.save(tmp_path / "checkpoint")
        saving.train_step(meta, version=0)
        silent.train_step(meta, version=0)
    assert largest_difference(saving.named_full_tensors(), silent.named_full_tensors()) == 0.0
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def drawn():
    """One number of each generator that a loss of the user's may draw from."""
    return torch.rand(()).item(), float(np.random.rand()), random.random(), random.gauss(0, 1)


def test_random_numbers_go_on_where_they_were(tiny_model, rows, tmp_path):
    trainer = make_rank(tiny_model, stored(rows)[0])
    drawn()  # Python's gauss keeps a second number for later
    trainer.save(tmp_path / "checkpoint")
    expected = [drawn() for _ in range(3)]
    trainer.load(tmp_path / "checkpoint")
    assert [drawn() for _ in range(3)] == expected
    other = make_rank(tiny_model, stored(rows)[0])
    other.load(tmp_path / "checkpoint")
    assert [drawn() for _ in range(3)] == expected


def test_ranks_that_did_not_save_take_the_random_numbers_of_those_that_did(tmp_path):
    for rank in range(2):
        (tmp_path / f"rng-{rank}.pt").touch()
    assert [rng_file_of(tmp_path, rank) for rank in range(5)] == ["rng-0.pt", "rng-1.pt", "rng-0.pt", "rng-1.pt", "rng-0.pt"]


def test_the_optimizers_settings_are_those_of_the_resumed_run_and_its_moments_those_of_the_checkpoint(tiny_model, rows, tmp_path):
    data_plane, meta = stored(rows)
    before = make_rank(tiny_model, data_plane)
    for version in range(2):
        before.train_step(meta, version=version)
    before.save(tmp_path / "checkpoint")

    other = OptimConfig(lr=5e-4, weight_decay=0.25, lr_scheduler_type="constant", eps=1e-6)
    resumed = make_rank(tiny_model, data_plane, optim=other)
    resumed.load(tmp_path / "checkpoint")
    (group,) = resumed._optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["eps"]) == (5e-4, 0.25, 1e-6)
    assert {float(state["step"]) for state in resumed._optimizer.state.values()} == {2.0}
    moments = [state["exp_avg"] for state in resumed._optimizer.state.values()]
    for moment, expected in zip(moments, before._optimizer.state.values(), strict=True):
        assert torch.equal(moment, expected["exp_avg"])
    assert resumed.train_step(meta, version=2)["train/lr/value"] == 5e-4


def test_a_schedule_goes_on_at_the_step_of_the_checkpoint(tiny_model, rows, tmp_path):
    data_plane, meta = stored(rows)
    before = make_rank(tiny_model, data_plane, optim=OptimConfig(lr=1e-3, lr_scheduler_type="constant", lr_warmup_steps=0))
    for version in range(3):
        before.train_step(meta, version=version)
    before.save(tmp_path / "checkpoint")
    resumed = make_rank(tiny_model, data_plane, optim=OptimConfig(lr=1e-3, lr_scheduler_type="linear", lr_warmup_steps=0))
    resumed.load(tmp_path / "checkpoint")
    # linear over 10 steps from 1 to min_lr_ratio (0 by default): the fourth step has 1 - 3/9 of the rate.
    assert resumed.train_step(meta, version=3)["train/lr/value"] == pytest.approx(1e-3 * (1 - 3 / 9))


def damage_cut(path):
    file = next(path.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def damage_no_metadata(path):
    (path / ".metadata").unlink()


def damage_garbled_metadata(path):
    (path / ".metadata").write_bytes(b"not a pickle")


def damage_gone(path):
    for file in path.iterdir():
        file.unlink()


def damage_no_rng(path):
    (path / "rng-0.pt").unlink()


def damage_garbled_rng(path):
    (path / "rng-0.pt").write_bytes(b"no numbers")


DAMAGES = [damage_cut, damage_no_metadata, damage_garbled_metadata, damage_gone, damage_no_rng, damage_garbled_rng]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_cannot_be_read_is_an_error_that_names_it(tiny_model, rows, tmp_path, damage):
    data_plane, _ = stored(rows)
    trainer = make_rank(tiny_model, data_plane)
    trainer.save(tmp_path / "checkpoint")
    damage(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="checkpoint"):
        trainer.load(tmp_path / "checkpoint")


def test_a_checkpoint_that_cannot_be_written_is_an_error(tiny_model, rows, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError):
        make_rank(tiny_model, stored(rows)[0]).save(tmp_path / "file" / "checkpoint")


def test_transformers_reads_the_saved_folder_with_the_trained_weights(tiny_model, rows, tmp_path):
    data_plane, meta = stored(rows)
    trainer = make_rank(tiny_model, data_plane)
    trainer.train_step(meta, version=0)
    trainer.save_hf(tmp_path / "model")
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "model").named_parameters())
    tensors = trainer.named_full_tensors()
    assert "lm_head.weight" not in tensors, "tied weights are there once"
    assert largest_difference({name: tensor.detach() for name, tensor in loaded.items()}, tensors) == 0.0
    assert torch.equal(tensors["model.embed_tokens.weight"], loaded["model.embed_tokens.weight"])


@pytest.mark.parametrize(("path", "dtype"), [("/nonexistent", "float32"), (None, "float8")])
def test_a_model_that_cannot_be_loaded_is_a_config_error(tiny_model, path, dtype):
    with pytest.raises(ConfigError):
        load_model(ModelConfig(path=path or str(tiny_model), dtype=dtype))
