"""What surrounds vLLM in its engine, without vLLM."""

import dataclasses
import itertools
import shutil
import sys
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from psrl.config.model import ModelConfig
from psrl.config.rollout import RolloutConfig
from psrl.engine_client.bodies import manifest_from_json, manifest_to_json
from psrl.engines.vllm.seeds import vllm_seed
from psrl.engines.vllm.update import check_shapes, checked_report, shapes_of_folder
from psrl.engines.vllm.worker_extension import on_node, take_names
from psrl.errors import ConfigError, EngineError, WeightSyncError
from psrl.parameter_server.layout import lay_out
from psrl.parameter_server.push import publish_tensors
from psrl.runtime.engines import NodeOfInstance, engine_command, vllm_python

SHAPES = {"a.weight": (2, 3), "b.weight": (4,)}


def manifest_of(**tensors):
    return lay_out(((name.replace("_", ".", 1), tensor) for name, tensor in tensors.items()), version=1)


def test_the_rest_of_a_turn_is_drawn_with_other_numbers_than_its_beginning():
    # 10,000 lengths of one seed, 10,000 seeds of one length: all different, all 63-bit.
    seeds = [vllm_seed(7, length) for length in range(10_000)] + [vllm_seed(seed, 10_000) for seed in range(10_000) if seed != 7]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_seed_and_a_length_always_give_the_same_numbers():
    assert vllm_seed(7, 100) == vllm_seed(7, 100)
    # splitmix64 of 0 steps its state to 0x9E3779B97F4A7C15 first; seed 1, length -1 begins there: its first output is known (Steele).
    assert vllm_seed(1, -1) == 0xE220A8397B1DCDAF >> 1


@pytest.mark.parametrize(
    ("tensors", "cause"),
    [
        ({"a_weight": torch.zeros(2, 3)}, "1 of 2 tensors match; missing .*b.weight"),
        ({"a_weight": torch.zeros(2, 3), "b_weight": torch.zeros(4), "c_weight": torch.zeros(1)}, "unknown .*c.weight"),
        ({"a_weight": torch.zeros(3, 2), "b_weight": torch.zeros(4)}, r"a.weight has shape \(3, 2\), the model has \(2, 3\)"),
        ({"a_weight": torch.zeros(2, 3), "b_weight": torch.zeros(4, dtype=torch.int64)}, "b.weight is int64"),
    ],
)
def test_tensors_of_another_model_are_refused(tensors, cause):
    with pytest.raises(WeightSyncError, match=cause):
        check_shapes(manifest_of(**tensors), SHAPES)


@pytest.mark.parametrize(
    ("name", "shape", "cause"),
    [
        ("a.lora_B.weight", (2, 4), None),
        ("a.lora_B.weight", (3, 4), r"a.lora_B.weight has shape \(3, 4\), the model has \(2, 4\)"),
        ("b.lora_B.weight", (4, 4), "b.lora_B.weight of an adapter belongs to no linear layer"),
    ],
)
def test_an_adapter_must_fit_layers_of_the_model(name, shape, cause):
    manifest = lay_out([("a.lora_A.weight", torch.zeros(4, 3)), (name, torch.zeros(shape))], version=1)
    if cause is None:
        check_shapes(manifest, SHAPES)
    else:
        with pytest.raises(WeightSyncError, match=cause):
            check_shapes(manifest, SHAPES)


def test_a_whole_version_is_reported_as_it_was_pushed():
    shared = publish_tensors({"a.weight": torch.ones(2, 3), "b.weight": torch.ones(4)}, 5)
    report = checked_report(shared.manifest, SHAPES)
    assert (report.version, report.num_matched, report.num_expected) == (5, 2, 2)
    assert report.checksum == shared.manifest.checksum
    with pytest.raises(WeightSyncError, match="checksum"):
        checked_report(dataclasses.replace(shared.manifest, checksum="crc32x8m:0:0"), SHAPES)
    shared.close()


def test_shapes_are_read_from_the_files_of_the_model(qwen3_folder, tmp_path):
    shapes = shapes_of_folder(qwen3_folder)
    assert shapes["model.embed_tokens.weight"] == (64, 32)
    assert "lm_head.weight" not in shapes  # tied
    with pytest.raises(EngineError, match=r"no .*safetensors"):
        shapes_of_folder(tmp_path)


def test_a_copy_of_tied_embeddings_in_the_folder_is_no_parameter_and_nobody_need_push_it(qwen3_folder, tmp_path):
    """As Qwen3-0.6B's: its file has `lm_head.weight`, its config.json says that the embeddings are tied."""
    tensors = load_file(qwen3_folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors")
    shutil.copy(qwen3_folder / "config.json", tmp_path)
    assert shapes_of_folder(tmp_path) == shapes_of_folder(qwen3_folder)
    check_shapes(lay_out(tensors.items(), version=1), shapes_of_folder(tmp_path))


def test_the_command_gives_the_machines_cores_out_among_all_processes_that_compute(monkeypatch, tmp_path):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    python = tmp_path / "python"
    python.touch()
    rollout = RolloutConfig(name="vllm", engine_python=str(python), num_replicas=2, tensor_model_parallel_size=2, device="cpu")
    command = engine_command(ModelConfig(path="m"), rollout)
    assert command[:3] == [str(python), "-m", "psrl.engines.vllm"]
    assert command[command.index("--num-threads") + 1] == "4"  # 16 cores, 2 replicas of 2 processes
    assert command[command.index("--tensor-parallel-size") + 1] == "2"


def test_each_node_of_an_instance_is_told_where_the_others_meet(tmp_path):
    python = tmp_path / "python"
    python.touch()
    rollout = RolloutConfig(name="vllm", engine_python=str(python), tensor_model_parallel_size=4, num_threads=3, device="cpu")
    node = NodeOfInstance(num_nodes=2, rank=1, address="127.0.0.1", meeting_address="10.0.0.1", meeting_port=1234)
    command = engine_command(ModelConfig(path="m"), rollout, node=node)
    said = {name: value for name, value in itertools.pairwise(command) if name.startswith("--")}
    assert (said["--num-nodes"], said["--node-rank"], said["--node-address"]) == ("2", "1", "127.0.0.1")
    assert (said["--meeting-address"], said["--meeting-port"]) == ("10.0.0.1", "1234")
    assert said["--node-interface"].startswith("lo")
    assert "--num-nodes" not in engine_command(ModelConfig(path="m"), rollout)


def test_the_workers_of_each_node_find_a_version_at_its_own_place():
    there = {"transport": "shared_memory", "path": "/proc/7/fd/3", "inode": "5"}
    manifest = dataclasses.replace(manifest_of(a_weight=torch.ones(2, 3)), location=there | {"inode": "4"}, follower_locations=(there,))
    carried = manifest_from_json(orjson.loads(orjson.dumps(manifest_to_json(manifest))))
    assert carried == manifest
    assert on_node(carried, 0) is carried
    assert on_node(carried, 1).location == there
    with pytest.raises(WeightSyncError, match="version 1 was not brought to node 2 of the instance"):
        on_node(carried, 2)


def test_what_vllms_processes_share_ends_with_them_once_its_names_are_taken():
    shared = shared_memory.SharedMemory(create=True, size=8)
    resource_tracker.unregister(f"/{shared.name}", "shared_memory")  # it would remove the name by itself when this process ends
    shared.buf[0] = 7
    take_names(Path("/proc/self/maps"))
    assert not Path("/dev/shm", shared.name).exists()
    assert shared.buf[0] == 7
    take_names(Path("/proc/self/maps"))  # by the next worker
    shared.close()


def test_without_vllm_the_error_names_the_command_that_installs_it(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    with pytest.raises(ConfigError, match=r"scripts/setup\.sh vllm"):
        vllm_python(RolloutConfig(name="vllm"))


def test_the_environment_beside_psrls_is_found(monkeypatch, tmp_path):
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert vllm_python(RolloutConfig(name="vllm")) == str(python)


def test_an_interpreter_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="is no interpreter"):
        vllm_python(RolloutConfig(name="vllm", engine_python="/nowhere/python"))
