"""What the plan says that training holds, against torch's own count and arithmetic by hand."""

import json

import pytest
import torch
from config_files import write_recipe
from transformers import AutoConfig, AutoModelForCausalLM

from psrl.config.load import load_config
from psrl.config.machine import Machine
from psrl.config.model import ModelConfig
from psrl.config.model_size import read_model_size
from psrl.config.plan import make_plan
from psrl.config.plan_of_training import MAX_CHUNK_LOGITS, activation_bytes, adapter_parameters, fine_tuning, train_workers, training_memory
from psrl.errors import ConfigError

SHAPE = {
    "vocab_size": 64, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}  # fmt: skip
NO_GPU, GPU = Machine(num_cores=8, memory_bytes=2**36), Machine(num_cores=8, memory_bytes=2**36, num_gpus=8, gpu_bytes=2**34)
FSDP = "train_actor_rollout_ref.actor.fsdp_config"
MODEL = "train_actor_rollout_ref.model"


def model_folder(tmp_path, kind, num_layers, **more):
    folder = tmp_path / f"{kind}-{num_layers}"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE | {"model_type": kind, "num_hidden_layers": num_layers} | more))
    return folder


def bytes_kept_by_torch(folder, dtype, *, is_checkpointed, num_tokens):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype, attn_implementation="sdpa").train()
    if is_checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = tensor  # held, so that no other tensor takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.base_model(input_ids=torch.zeros(1, num_tokens, dtype=torch.int64), use_cache=False)[0]
    del hidden
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_those_that_torch_keeps(tmp_path, kind, dtype):
    head_dim = {"head_dim": 48} if kind == "qwen3" else {}
    kept, planned = [], []
    for num_layers in (1, 3):
        folder = model_folder(tmp_path, kind, num_layers, **head_dim)
        kept.append(bytes_kept_by_torch(folder, getattr(torch, dtype), is_checkpointed=False, num_tokens=256))
        planned.append(activation_bytes(read_model_size(str(folder)), 256, dtype=dtype))
    assert planned[1] - planned[0] == pytest.approx(kept[1] - kept[0], rel=0.02), "by layer"
    assert planned[1] == pytest.approx(kept[1], rel=0.05)


def test_checkpointing_keeps_the_input_of_each_layer_and_the_inside_of_one(tmp_path):
    kept, planned = [], []
    for num_layers in (2, 4):
        folder = model_folder(tmp_path, "llama", num_layers)
        kept.append(bytes_kept_by_torch(folder, torch.float32, is_checkpointed=True, num_tokens=256))
        planned.append(activation_bytes(read_model_size(str(folder)), 256, dtype="float32", is_checkpointed=True))
    assert planned[1] - planned[0] == pytest.approx(kept[1] - kept[0], rel=0.02)


def test_the_plan_knows_how_many_logits_there_are_at_once():
    from psrl.algorithms import logprobs

    assert MAX_CHUNK_LOGITS == logprobs.MAX_CHUNK_LOGITS


def memory_of(tmp_path, *overrides):
    config = load_config(str(write_recipe(tmp_path)), overrides)
    return training_memory(config, read_model_size(config.train_actor_rollout_ref.model.path))


PARAMETERS = 27_776  # 100 x 32 + 12 x 2 x 32^2, as the plan estimates a model whose weights are not written yet


def test_weights_gradients_and_moments_are_divided_within_a_copy(tmp_path):
    one = memory_of(tmp_path)
    assert (one.weights, one.gradients, one.optimizer, one.gathered) == (4 * PARAMETERS, 4 * PARAMETERS, 8 * PARAMETERS, 0)
    four = memory_of(tmp_path, "trainer.num_workers=4")
    assert (four.weights, four.gradients, four.optimizer) == (PARAMETERS, PARAMETERS, 2 * PARAMETERS)
    # embedding 3,200 and two layers of (27,776 - 3,200) / 2; the gradient of a layer, and once more to be reduced
    assert four.gathered == (3_200 + 2 * 12_288) * 4 + 12_288 * 8
    copies = memory_of(tmp_path, "trainer.num_workers=4", f"{FSDP}.fsdp_size=2")
    assert (copies.weights, copies.optimizer) == (2 * PARAMETERS, 4 * PARAMETERS)
    whole = memory_of(tmp_path, "trainer.num_workers=4", f"{FSDP}.reshard_after_forward=false")
    assert whole.gathered == PARAMETERS * 4 + 12_288 * 8


def test_fine_tuning_is_divided_as_training_is(tmp_path):
    def card(*overrides):
        config = load_config(str(write_recipe(tmp_path)), ["trainer.num_workers=4", "sft.batch_size=4", *overrides])
        return fine_tuning(config, GPU).gpu_bytes

    # weights, gradients and two moments: a quarter of them in one copy over four ranks, a half where two ranks hold a copy
    assert card(f"{FSDP}.fsdp_size=2") - card() == 4 * 4 * PARAMETERS // 4
    # all layers stay whole, and not two and the embedding: nothing more for a model of two layers
    assert card(f"{FSDP}.reshard_after_forward=false") == card()


def test_an_adapter_has_gradients_and_moments_and_the_model_has_not(tmp_path):
    # rank 8; H 32, Q 32, K 16, I 128: q and o 64, k and v 48, gate, up and down 160 each; two layers
    trained = 8 * 2 * (64 + 64 + 48 + 48 + 3 * 160)
    memory = memory_of(tmp_path, f"{MODEL}.lora_rank=8", "train_actor_rollout_ref.actor.use_kl_loss=true")
    assert (memory.weights, memory.gradients, memory.optimizer) == (4 * (PARAMETERS + trained), 4 * trained, 8 * trained)
    assert memory.others == 0, "the frozen model is the reference"
    size = read_model_size(str(tmp_path / "model"))
    assert adapter_parameters(ModelConfig(path="", lora_rank=8, target_modules=["q_proj", "o_proj"]), size) == 8 * 2 * 128


def test_a_critic_has_weights_gradients_and_moments_of_its_own(tmp_path):
    memory = memory_of(tmp_path, "algorithm.adv_estimator=gae")
    assert (memory.others, memory.optimizer) == (8 * PARAMETERS, 16 * PARAMETERS)


def test_what_is_offloaded_lies_in_the_hosts_memory(tmp_path):
    def row(machine, *overrides):
        config = load_config(str(write_recipe(tmp_path)), overrides)
        return train_workers(config, machine, read_model_size(config.train_actor_rollout_ref.model.path))

    here, there = row(NO_GPU), row(GPU)
    assert here.gpu_bytes == 0
    assert here.memory_bytes - there.memory_bytes == there.gpu_bytes
    moments = row(GPU, f"{FSDP}.optimizer_offload=true")
    assert moments.memory_bytes - there.memory_bytes == there.gpu_bytes - moments.gpu_bytes == 8 * PARAMETERS
    everything = row(GPU, f"{FSDP}.offload_policy=true")
    assert everything.memory_bytes - there.memory_bytes == 16 * PARAMETERS
    for what in ("weights", "gradients", "optimizer", "activations", "logits"):
        assert f"{what} " in there.reason


def test_a_rank_that_does_not_fit_on_its_card_is_refused_with_what_it_would_hold(tmp_path):
    small = Machine(num_cores=8, memory_bytes=2**36, num_gpus=1, gpu_bytes=2**20)
    engine = "gen_actor_rollout_ref.rollout.device=cpu"
    with pytest.raises(ConfigError, match=r"train worker needs .* of a card") as info:
        make_plan(load_config(str(write_recipe(tmp_path)), [engine]), small)
    assert "activations" in info.value.rule
    assert "trainer.num_workers" in info.value.fix
    make_plan(load_config(str(write_recipe(tmp_path)), [engine]), GPU)


def test_mixed_precision_halves_activations_and_not_the_weights(tmp_path):
    exact, mixed = memory_of(tmp_path), memory_of(tmp_path, f"{MODEL}.compute_dtype=bfloat16")
    assert mixed.weights == exact.weights
    assert 0.5 * exact.activations < mixed.activations < 0.7 * exact.activations


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        ([f"{FSDP}.fsdp_size=3", "trainer.num_workers=4"], "fsdp_size", "1, 2, 4"),
        ([f"{FSDP}.fsdp_size=0", "trainer.num_workers=4"], "fsdp_size", "-1"),
        ([f"{FSDP}.fsdp_size=4", "trainer.num_workers=4"], "fsdp_size", "leave"),
        ([f"{FSDP}.fsdp_size=2"], "fsdp_size", "trainer.num_workers"),
        ([f"{FSDP}.reshard_after_forward=false"], "reshard_after_forward", "trainer.num_workers"),
        ([f"{FSDP}.offload_policy=true", "trainer.device=cpu"], "offload_policy", "cuda"),
        ([f"{FSDP}.offload_policy=true", f"{FSDP}.optimizer_offload=true"], "optimizer_offload", "leave"),
        ([f"{MODEL}.compute_dtype=float32"], "compute_dtype", "leave"),
        ([f"{MODEL}.compute_dtype=float32", f"{MODEL}.dtype=bfloat16"], "compute_dtype", "dtype=float32"),
        ([f"{MODEL}.compute_dtype=float8"], "compute_dtype", "bfloat16"),
        (["trainer.export_dtype=float32"], "export_dtype", "leave"),
        ([f"{MODEL}.lora_alpha=2.0"], "lora_alpha", "lora_rank"),
        ([f"{MODEL}.lora_merge=true"], "lora_merge", "lora_rank"),
        ([f"{MODEL}.lora_rank=-1"], "lora_rank", "0"),
        ([f"{MODEL}.lora_rank=4", f"{MODEL}.target_modules=[]"], "target_modules", "all-linear"),
        ([f"{MODEL}.lora_rank=4", f"{MODEL}.target_modules=[all-linear,q_proj]"], "target_modules", "all-linear"),
    ],
)
def test_settings_that_cannot_work_or_change_nothing_are_refused(tmp_path, overrides, key, fix):
    with pytest.raises(ConfigError) as info:
        load_config(str(write_recipe(tmp_path)), overrides)
    assert info.value.key.endswith(key)
    assert fix in info.value.fix
