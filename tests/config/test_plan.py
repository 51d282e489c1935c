"""The plan of processes: what each must hold, and plans that a machine cannot hold."""

import json
import struct

import pytest
from config_files import write_recipe

from psrl.config.load import Purpose, load_config
from psrl.config.machine import Machine, read_machine
from psrl.config.model_size import ModelSize, kv_cache_bytes, read_model_size
from psrl.config.plan import make_plan, make_sft_plan
from psrl.config.plan_of_engines import WEIGHT_VERSIONS_KEPT, engine_threads
from psrl.config.plan_of_training import SFT_MICRO_BATCH_TOKENS
from psrl.config.rollout import RolloutConfig
from psrl.errors import ConfigError

LAPTOP = Machine(num_cores=2, memory_bytes=16 * 2**30)


def plan_of(tmp_path, overrides=(), machine=LAPTOP):
    return make_plan(load_config(str(write_recipe(tmp_path)), overrides), machine)


def process(plan, role):
    return next(each for each in plan.processes if each.role == role)


def test_the_kv_cache_holds_keys_and_values_of_every_slot():
    size = ModelSize(
        num_parameters=1, num_layers=2, num_kv_heads=2, head_dim=8, vocab_size=10, hidden_size=16, intermediate_size=64, num_heads=2,
        has_qk_norm=False,
    )  # fmt: skip
    # 2 (keys, values) x 2 layers x 2 heads x 8 numbers x 4 slots x 100 tokens x 4 bytes.
    assert kv_cache_bytes(size, num_slots=4, num_tokens=100, dtype="float32") == 102_400
    assert kv_cache_bytes(size, num_slots=4, num_tokens=100, dtype="bfloat16") == 51_200


def test_parameters_are_counted_from_the_headers_of_safetensors_files(tmp_path):
    write_recipe(tmp_path)
    header = {"__metadata__": {"format": "pt"}, "a": {"dtype": "F32", "shape": [100, 32], "data_offsets": [0, 12800]}}
    header["b"] = {"dtype": "F32", "shape": [7], "data_offsets": [12800, 12828]}
    raw = json.dumps(header).encode()
    (tmp_path / "model" / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(12828))
    assert read_model_size(str(tmp_path / "model")).num_parameters == 100 * 32 + 7


def test_every_kind_of_process_is_in_the_plan(tmp_path):
    (tmp_path / "tools.yaml").write_text("tools: []")
    tools = f"gen_actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path}/tools.yaml"
    plan = plan_of(tmp_path, ["transfer_queue.num_data_storage_units=2", "sandbox.num_workers=3", tools])
    counts = {each.role: each.count for each in plan.processes}
    assert counts == {
        "controller": 1,
        "train worker": 1,
        "torch engine": 1,
        "agent worker": 1,
        "sandbox": 3,
        "TransferQueue": 3,
        "parameter server": 1,
    }
    assert plan.num_processes == 11
    assert plan.memory_bytes == sum(each.count * each.memory_bytes for each in plan.processes)


def test_validation_alone_has_no_trainer_and_tools_alone_have_sandboxes(tmp_path):
    plan = make_plan(load_config(str(write_recipe(tmp_path))), LAPTOP, with_training=False)
    assert [each.role for each in plan.processes] == ["controller", "torch engine", "agent worker", "TransferQueue", "parameter server"]


def test_fine_tuning_is_one_process_that_must_fit(tmp_path):
    config = load_config(str(write_recipe(tmp_path)), ["sft.batch_size=100000"], purpose=Purpose.SFT)
    (process,) = make_sft_plan(config, LAPTOP).processes
    # Estimated parameters 100 x 32 + 12 x 2 x 32^2 = 27,776, five copies of 4 bytes; 16,384 tokens, of which each keeps in 2 layers
    # 4 x 128 + 6 x 32 + 4 x (32 + 16) and once 3 x 32 numbers of 4 bytes; logits of 16,384 x 100 in float32, three times.
    assert process.memory_bytes == 450 * 2**20 + 27_776 * 4 * 5 + 16_384 * 4 * (2 * (512 + 192 + 192) + 96) + 16_384 * 100 * 4 * 3
    with pytest.raises(ConfigError, match="fine-tuning") as info:
        make_sft_plan(config, Machine(num_cores=2, memory_bytes=2**29))
    assert info.value.key == "sft.batch_size"


def test_the_plan_of_fine_tuning_knows_its_micro_batches():
    from psrl.training.sft import MAX_MICRO_BATCH_TOKENS

    assert SFT_MICRO_BATCH_TOKENS == MAX_MICRO_BATCH_TOKENS


def test_the_plan_of_weight_versions_knows_how_many_are_kept():
    from psrl.runtime.parameter_server import NUM_KEPT

    assert WEIGHT_VERSIONS_KEPT == NUM_KEPT


def test_versions_in_shared_memory_are_planned_once_for_all_replicas_of_a_node(tmp_path):
    def shared_bytes(*overrides, **options):
        config = load_config(str(write_recipe(tmp_path)), ["gen_actor_rollout_ref.rollout.num_threads=1", *overrides])
        plan = make_plan(config, Machine(num_cores=8, memory_bytes=64 * 2**30), **options)
        return process(plan, "parameter server").memory_bytes - 150 * 2**20

    weights = 27_776 * 4  # as estimated above
    eight = "gen_actor_rollout_ref.rollout.num_replicas=8"
    assert shared_bytes() == shared_bytes(eight) == 3 * weights  # two are kept while one is written
    assert shared_bytes(eight, "psrl.staleness=3") == 5 * weights  # two older ones may still be served
    assert shared_bytes("psrl.staleness=3") == 4 * weights  # one replica serves one
    assert shared_bytes(with_training=False) == 0


def test_threads_of_zero_share_the_cores(tmp_path):
    eight = Machine(num_cores=8, memory_bytes=64 * 2**30)
    plan = plan_of(tmp_path, ["trainer.num_workers=2", "gen_actor_rollout_ref.rollout.num_replicas=4"], eight)
    assert process(plan, "train worker").num_cores == 4
    assert process(plan, "torch engine").num_cores == 1  # of its two: the model is tiny


@pytest.mark.parametrize(
    ("name", "num_parameters", "given", "threads"),
    [
        ("torch", 900_000, 0, 1),
        ("torch", 27_000_000, 0, 6),
        ("torch", 500_000_000, 0, 8),
        ("torch", 900_000, 2, 2),
        ("vllm", 900_000, 0, 8),
    ],
)
def test_a_torch_engine_takes_the_threads_that_its_model_can_use(name, num_parameters, given, threads):
    size = ModelSize(
        num_parameters=num_parameters, num_layers=2, num_kv_heads=2, head_dim=8, vocab_size=10, hidden_size=16, intermediate_size=64,
        num_heads=2, has_qk_norm=False,
    )  # fmt: skip
    assert engine_threads(RolloutConfig(name=name, num_threads=given), size, share=8) == threads


def test_more_ranks_than_cores_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer.num_workers=3.*3 cores of 2.*at most 2"):
        plan_of(tmp_path, ["trainer.num_workers=3"])


def test_more_threads_than_cores_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="num_threads"):
        plan_of(tmp_path, ["gen_actor_rollout_ref.rollout.num_threads=4"])


def test_a_kv_cache_that_does_not_fit_is_refused_with_its_setting(tmp_path):
    with pytest.raises(ConfigError) as info:
        plan_of(tmp_path, ["gen_actor_rollout_ref.rollout.max_num_seqs=1000000"])
    assert info.value.key == "gen_actor_rollout_ref.rollout.max_num_seqs"
    assert "KV cache" in info.value.rule


def test_a_machine_too_small_for_the_libraries_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="GiB"):
        plan_of(tmp_path, machine=Machine(num_cores=2, memory_bytes=2**30))


def test_cuda_without_a_gpu_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"trainer\.device=cpu"):
        plan_of(tmp_path, ["trainer.device=cuda"])


def test_a_model_without_sizes_is_refused(tmp_path):
    config = load_config(str(write_recipe(tmp_path)))
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        make_plan(config, LAPTOP)


def test_this_machine_has_cores_and_memory():
    machine = read_machine()
    assert machine.num_cores >= 1
    assert machine.memory_bytes > 2**28


def test_the_gateways_processes_are_in_the_plan_of_a_run_that_has_one(tmp_path):
    without = {each.role for each in plan_of(tmp_path).processes}
    with_it = {each.role for each in plan_of(tmp_path, ["psrl.rollout_gateway.enable=true"]).processes}
    assert with_it - without == {"gateway", "SMG", "session router"}
