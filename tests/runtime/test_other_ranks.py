"""`psrl train --resume` with another number of train workers, and with an adapter: through all real parts."""

import math

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from psrl.telemetry.run_folder import RunFolder
from tests.runtime.command import start
from tests.runtime.test_main_job import SMALL

MINUTES_S = 400.0


def run(folder, *more):
    command = start(folder, "train", "retool_tiny", *SMALL, f"trainer.default_local_dir={folder}", "trainer.val_before_train=false", *more)
    output = command.output(MINUTES_S)
    assert command.process.returncode == 0, output
    assert command.leftovers() == []
    return command, output


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_another_number_of_train_workers(tmp_path, first, then):
    run(tmp_path, f"trainer.num_workers={first}", "trainer.total_training_steps=2")
    command, output = run(tmp_path, "--resume", f"trainer.num_workers={then}", "trainer.total_training_steps=4")
    assert f"trainer.num_workers is {then} now, was {first}" in output
    steps = command.metrics()
    assert {1, 2, 3, 4} <= set(steps)
    assert all(steps[step]["train/logprob_gap/max"] < 1e-3 for step in (3, 4)), "the engine has the weights that were restored"


@pytest.mark.slow
def test_an_adapter_is_trained_sent_checkpointed_and_exported(tmp_path):
    lora = ("train_actor_rollout_ref.model.lora_rank=4", "train_actor_rollout_ref.actor.optim.lr=0.01")
    run(tmp_path, *lora, "trainer.total_training_steps=2", "trainer.export_dtype=bfloat16")
    command, output = run(tmp_path, "--resume", "trainer.total_training_steps=3")
    assert "weights" in output and "MiB" in output, "the memory plan is printed before the start"
    gaps = [command.metrics()[step]["train/logprob_gap/max"] for step in (1, 2, 3)]
    assert all(math.isfinite(gap) and gap < 1e-3 for gap in gaps), gaps
    folder = RunFolder.latest(tmp_path, "retool_tiny").path / "model"
    assert str(AutoModelForCausalLM.from_pretrained(folder).dtype) == "torch.bfloat16"
    assert len(AutoTokenizer.from_pretrained(folder)) > 0
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
