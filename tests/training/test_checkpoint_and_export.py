"""A run that stops and goes on equals one that never stopped; what is saved can be read by others."""

import pytest
import torch
from training_builders import largest_difference, make_rank, stored
from transformers import AutoModelForCausalLM

from psrl.config.model import ModelConfig
from psrl.errors import CheckpointError, ConfigError
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


@pytest.mark.parametrize("damage", [damage_cut, damage_no_metadata, damage_garbled_metadata, damage_gone])
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
