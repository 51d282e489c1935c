"""What FSDP2 does with a GPU: offload, mixed precision, and memory against the plan. Written without one at hand."""

import pytest
import torch
from rank_processes import run_ranks
from test_many_ranks import furthest, play
from training_builders import largest_difference, make_rank, stored

from psrl.config.actor import FsdpConfig
from psrl.config.model import ModelConfig
from psrl.config.model_size import read_model_size
from psrl.config.plan_of_training import activation_bytes
from psrl.training.model import load_model

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
STEPS = 4
HELD = {
    "plain": {},
    "all on the host": {"fsdp_config": FsdpConfig(offload_policy=True)},
    "moments on the host": {"fsdp_config": FsdpConfig(optimizer_offload=True)},
    "activation checkpointing": {"gradient_checkpointing": True},
}


def play_on_cuda(rank, world_size, init_method, model_path, folder, numbers, options):
    return play(rank, world_size, init_method, model_path, folder, numbers, STEPS, device="cuda", **options)


@pytest.mark.parametrize("how", HELD)
def test_one_gpu_learns_what_the_cpu_learns(tiny_model, tmp_path, how):
    on_cpu = play(0, 1, "", str(tiny_model), str(tmp_path), None, STEPS)
    (on_gpu,) = run_ranks(1, tmp_path / "gpu", play_on_cuda, str(tiny_model), str(tmp_path), None, HELD[how])
    assert furthest(on_cpu, on_gpu) < 1e-3
    assert largest_difference(on_cpu["tensors"], on_gpu["tensors"]) < 1e-3


def test_moments_are_on_the_host_between_updates(tiny_model, rows):
    data_plane, meta = stored(rows)
    trainer = make_rank(tiny_model, data_plane, device="cuda", fsdp_config=FsdpConfig(optimizer_offload=True))
    trainer.train_step(meta, version=0)
    kinds = {state["exp_avg"].device.type for state in trainer._optimizer.state.values()}
    assert kinds == {"cpu"}
    trainer.close()


def test_activations_on_the_card_are_within_fifteen_per_cent_of_the_plan(tiny_model):
    model = load_model(ModelConfig(path=str(tiny_model)), device="cuda")
    ids = torch.zeros(64, 512, dtype=torch.int64, device="cuda")
    few = torch.arange(8, device="cuda")
    before = torch.cuda.memory_allocated()
    logprobs, _ = model(ids, few, few, torch.ones(8, device="cuda"))
    kept = torch.cuda.memory_allocated() - before
    assert logprobs.requires_grad
    assert activation_bytes(read_model_size(str(tiny_model)), ids.numel(), dtype="float32") == pytest.approx(kept, rel=0.15)
