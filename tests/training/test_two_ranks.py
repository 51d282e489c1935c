"""Two FSDP2 ranks on gloo train as one rank does; real processes."""

import multiprocessing

import pytest
import torch
from training_builders import largest_difference, make_rank, make_rows, stored

from psrl.config.actor import OptimConfig
from psrl.errors import TrainingError
from psrl.parameter_server.layout import read_tensors
from psrl.parameter_server.transports.shared_memory import open_version

STEPS = 3
OPTIONS = {
    "use_kl_loss": True, "ppo_mini_batch_size": 2, "entropy_coeff": 0.01, "optim": OptimConfig(lr=1e-3, weight_decay=0.01),
    "old_logprobs": "recompute",
    "correction": {"rollout_is": "sequence", "rollout_rs": "token_k1,seq_mean_k3", "rollout_rs_threshold": "0.5_2.0,1.0"},
}  # fmt: skip


def train(model_path, folder, rank, world_size, **options):
    """STEPS steps; odd numbers of rows in an update, so that ranks do not have the same number of them."""
    rows = make_rows(model_path)[:-1]
    data_plane, meta = stored(rows)
    init_method = f"file://{folder}/rendezvous"
    trainer = make_rank(model_path, data_plane, rank=rank, world_size=world_size, init_method=init_method, **OPTIONS, **options)
    metrics = [trainer.train_step(meta, version=0) for _ in range(STEPS)]
    tensors = trainer.named_full_tensors()
    shared = trainer.publish(7)
    if rank == 0:
        published = read_tensors(open_version(shared.manifest), shared.manifest)
        assert published.keys() == tensors.keys()
        assert all(torch.equal(published[name], tensor) for name, tensor in tensors.items())
        shared.close()
    trainer.save(f"{folder}/checkpoint-{world_size}")
    trainer.save_hf(f"{folder}/model-{world_size}")
    rows[0].columns["rollout_logprobs"].fill_(torch.nan)
    with pytest.raises(TrainingError) as refused:
        trainer.train_step(meta, version=0)
    torch.save({"metrics": metrics, "tensors": tensors, "error": str(refused.value)}, f"{folder}/result-{world_size}-{rank}.pt")
    trainer.close()
    trainer.close()


def test_two_ranks_give_the_loss_and_weights_of_one(tiny_model, tmp_path):
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=train, args=(str(tiny_model), str(tmp_path), rank, 2)) for rank in range(2)]
    for process in ranks:
        process.start()
    train(str(tiny_model), str(tmp_path), 0, 1)
    for process in ranks:
        process.join(timeout=300)
    assert [process.exitcode for process in ranks] == [0, 0]

    one = torch.load(tmp_path / "result-1-0.pt")
    first, second = (torch.load(tmp_path / f"result-2-{rank}.pt") for rank in range(2))
    for step in range(STEPS):
        for name in (
            "loss/value",
            "grad_norm/mean",
            "entropy/mean",
            "ref_kl/mean",
            "logprob_gap/max",
            "logprob_gap/mean_turn1",
            "clip/fraction",
        ):
            expected = one["metrics"][step][f"train/{name}"]
            assert first["metrics"][step][f"train/{name}"] == pytest.approx(expected, abs=1e-5), (step, name)
            assert second["metrics"][step][f"train/{name}"] == first["metrics"][step][f"train/{name}"]
        mismatch = {name: value for name, value in one["metrics"][step].items() if name.startswith("mismatch/")}
        assert mismatch == pytest.approx({name: first["metrics"][step][name] for name in mismatch}, rel=1e-4, abs=1e-5), step
    assert one["metrics"][2]["mismatch/weight/truncated_share"] > 0
    assert 0 < one["metrics"][2]["mismatch/rejected/token_share"] < 1
    assert largest_difference(one["tensors"], first["tensors"]) < 1e-5
    assert largest_difference(first["tensors"], second["tensors"]) == 0.0

    errors = sorted((first["error"], second["error"]))
    assert "another rank" in errors[0], "the rank with good rows ends too, at once"
    assert "row g0-e0-t0" in errors[1]

    data_plane, _ = stored([])
    resumed = make_rank(tiny_model, data_plane, **OPTIONS)
    resumed.load(tmp_path / "checkpoint-2")
    assert largest_difference(resumed.named_full_tensors(), first["tensors"]) == 0.0, "one rank reads what two wrote"
    reloaded = make_rank(tmp_path / "model-2", data_plane)
    assert largest_difference(reloaded.named_full_tensors(), first["tensors"]) == 0.0
