"""LoRA: what is trained, sent, merged and exported, on a real model."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from training_builders import largest_difference, make_rank, stored
from transformers import AutoModelForCausalLM

from psrl.config.model import ModelConfig
from psrl.engines.torch.architecture import read_architecture
from psrl.engines.torch.update import checked
from psrl.engines.torch.weights import Weights, load_folder
from psrl.errors import ConfigError, WeightSyncError
from psrl.parameter_server.layout import read_tensors
from psrl.parameter_server.push import publish_tensors
from psrl.parameter_server.transports.shared_memory import open_version
from psrl.training.model import load_model

LORA = {"lora_rank": 3, "lora_alpha": 6.0}


@pytest.fixture
def trained(tiny_model, rows):
    data_plane, meta = stored(rows)
    trainer = make_rank(tiny_model, data_plane, model=LORA)
    for _ in range(2):
        trainer.train_step(meta, version=0)
    return trainer


def start_of(tiny_model, dtype=torch.float32):
    return load_folder(tiny_model, read_architecture(tiny_model), dtype=dtype, device=torch.device("cpu"))


def matrices(weights):
    layers = {f"{index}.{name}": getattr(layer, name) for index, layer in enumerate(weights.layers) for name in layer.__slots__}
    every = layers | {"embedding": weights.embedding, "norm": weights.final_norm, "head": weights.head}
    return {name: tensor for name, tensor in every.items() if tensor is not None}


def test_only_the_adapter_is_sent_and_the_engine_serves_what_the_trainer_exports(tiny_model, trained):
    shared = trained.publish(5)
    names = {piece.name for piece in shared.manifest.tensors}
    assert len(names) == 2 * 2 * 7, "two layers, seven linear layers each, A and B"
    assert "model.layers.1.mlp.down_proj.lora_B.weight" in names
    # hidden 32, q 32, k and v 16, inner 64, rank 3: q 3*64, k and v 3*48 each, o 3*64, gate, up and down 3*96 each; 2 layers of float32.
    assert sum(piece.size_bytes for piece in shared.manifest.tensors) == 2 * 4 * 3 * (64 + 48 + 48 + 64 + 3 * 96)

    start = start_of(tiny_model)
    before = {name: tensor.clone() for name, tensor in matrices(start).items()}
    version = checked(shared.manifest, start)
    assert (version.report.version, version.report.num_matched, version.report.num_expected) == (5, 28, 28)
    assert version.report.checksum == shared.manifest.checksum
    tensors = trained.named_full_tensors()
    exported = Weights.of(start.shape, tensors, dtype=torch.float32, device=torch.device("cpu"))
    assert largest_difference(matrices(version.weights), matrices(exported)) < 1e-6
    assert largest_difference(matrices(version.weights), before) > 1e-4, "the adapter has learnt"
    assert largest_difference(matrices(start), before) == 0.0, "the next version starts from the same weights"
    assert version.weights.embedding is start.embedding
    shared.close()


def test_merged_weights_are_sent_where_the_engine_does_not_merge(tiny_model, rows):
    trainer = make_rank(tiny_model, stored(rows)[0], model=LORA | {"lora_merge": True})
    shared = trainer.publish(1)
    sent = read_tensors(open_version(shared.manifest), shared.manifest)
    assert largest_difference(sent, trainer.named_full_tensors()) == 0.0
    shared.close()


def damage(name, tensor):
    return {
        "no partner": {name: None},
        "another rank": {name: tensor[:2]},
        "no such layer": {name: None, name.replace("layers.0", "layers.9"): tensor},
        "a layer too many": {name.replace("layers.0", "layers.9").replace("lora_A", kind): tensor for kind in ("lora_A", "lora_B")},
    }


@pytest.mark.parametrize("what", ["no partner", "another rank", "no such layer", "a layer too many"])
def test_an_adapter_of_another_model_is_refused(tiny_model, trained, what):
    shared = trained.publish(1)
    sent = read_tensors(open_version(shared.manifest), shared.manifest)
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    changed = {key: tensor for key, tensor in (sent | damage(name, sent[name])[what]).items() if tensor is not None}
    other = publish_tensors(changed, 2)
    with pytest.raises(WeightSyncError, match="adapter"):
        checked(other.manifest, start_of(tiny_model))
    shared.close()
    other.close()


def test_the_exported_folder_is_merged_and_the_adapter_beside_it_is_pefts(tiny_model, trained, rows, tmp_path):
    trained.save_hf(tmp_path / "model", dtype="bfloat16")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert merged.dtype == torch.bfloat16
    ids = rows[0].columns["input_ids"][None]
    base = AutoModelForCausalLM.from_pretrained(tiny_model)
    with torch.no_grad():
        untrained = base(ids).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "model" / "adapter")(ids).logits
        assert float((adapted - untrained).abs().max()) > 1e-2
        trained_BT = trained._policy.causal_lm(ids).logits
        assert float((adapted - trained_BT).abs().max()) < 1e-5
        assert float((merged(ids).logits - trained_BT).abs().max()) < 0.2, "bfloat16 has three digits"


def test_a_checkpoint_holds_the_adapter_alone(tiny_model, trained, rows, tmp_path):
    trained.save(tmp_path / "checkpoint")
    names = FileSystemReader(tmp_path / "checkpoint").read_metadata().state_dict_metadata
    weights = [name for name in names if name.startswith("model.")]
    assert len(weights) == 28 and all(".lora_" in name for name in weights)
    assert len([name for name in names if name.endswith(("exp_avg", "exp_avg_sq"))]) == 2 * 28
    resumed = make_rank(tiny_model, stored(rows)[0], model=LORA)
    resumed.load(tmp_path / "checkpoint")
    assert largest_difference(resumed.named_full_tensors(), trained.named_full_tensors()) == 0.0


def test_the_frozen_weights_are_the_reference_without_a_second_model(tiny_model, rows):
    data_plane, meta = stored(rows)
    adapter = make_rank(tiny_model, data_plane, model=LORA, use_kl_loss=True)
    assert adapter._reference_model is None
    assert adapter.train_step(meta, version=0)["train/ref_kl/mean"] == pytest.approx(0.0, abs=1e-7)
    assert adapter.train_step(meta, version=0)["train/ref_kl/mean"] > 1e-5


def test_adapters_are_float32_in_a_bfloat16_model(tiny_model):
    model = load_model(ModelConfig(path=str(tiny_model), dtype="bfloat16", **LORA))
    kinds = {(parameter.requires_grad, parameter.dtype) for parameter in model.parameters()}
    assert kinds == {(True, torch.float32), (False, torch.bfloat16)}


@pytest.mark.parametrize("names", [["no_such_layer"], ["lm_head"], ["embed_tokens"]])
def test_layers_that_cannot_have_an_adapter_are_a_config_error(tiny_model, names):
    with pytest.raises(ConfigError, match="target_modules"):
        load_model(ModelConfig(path=str(tiny_model), target_modules=names, **LORA))


def test_exported_weights_have_the_dtype_that_is_asked_for(tiny_model, rows, tmp_path):
    trainer = make_rank(tiny_model, stored(rows)[0])
    trainer.save_hf(tmp_path / "half", dtype="bfloat16")
    tensors = load_file(tmp_path / "half" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16
    assert not (tmp_path / "half" / "adapter").exists()
