"""`psrl sft` on several ranks learns what one learns, and says why where a rank ends."""

import pytest
from safetensors.torch import load_file

from psrl.config.load import Purpose, load_config
from psrl.errors import ProcessDiedError
from psrl.runtime.sft import run_sft

STEPS = ("sft.num_steps=3", "sft.batch_size=3", "sft.warmup_steps=1")


def fine_tuned(folder, name, *overrides):
    config = load_config("retool_tiny", [*STEPS, f"sft.output_path={folder / name}", *overrides], purpose=Purpose.SFT)
    return load_file(run_sft(config) / "model.safetensors")


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns(tmp_path):
    # Of three rows one rank has two and the other one; checkpointing changes no number.
    one = fine_tuned(tmp_path, "one")
    two = fine_tuned(tmp_path, "two", "trainer.num_workers=2", "train_actor_rollout_ref.actor.gradient_checkpointing=true")
    assert one.keys() == two.keys()
    # AdamW divides a gradient near zero by its own size: rounding in another order moves such a weight by a share of lr, which is 2e-3.
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 1e-4


@pytest.mark.slow
def test_a_rank_that_ends_is_named_with_its_last_words(tmp_path):
    with pytest.raises(ProcessDiedError, match=r"rank \d of fine-tuning ended: .*sft.max_length is 8"):
        fine_tuned(tmp_path, "never", "trainer.num_workers=2", "sft.max_length=8")
    assert not (tmp_path / "never").exists()
