"""A run whose replicas are vLLM's: it trains, takes weights while it generates, and trainer and engines agree. Part of `make test-vllm`."""

import pytest

from psrl.config.rollout import RolloutConfig
from psrl.runtime.engines import vllm_python
from tests.runtime.command import start

pytestmark = pytest.mark.slow
GEN = "gen_actor_rollout_ref.rollout"
START_S = 1200
MAX_GAP_NATS = 2e-2


def test_three_asynchronous_steps_with_two_vllm_replicas(tmp_path):
    engines = [f"{GEN}.name=vllm", f"{GEN}.num_replicas=2", f"{GEN}.engine_python={vllm_python(RolloutConfig(name='vllm'))}"]
    patience = [f"{GEN}.startup_timeout_s={START_S}", f"psrl.deadlines.startup_s={START_S}", "psrl.deadlines.data_plane_s=300"]
    sizes = ["data.train_batch_size=4", "psrl.rollout_n=4", f"{GEN}.max_num_seqs=16", "data.generator.num_val=8"]
    steps = ["psrl.staleness=1", "trainer.total_training_steps=3", "trainer.test_freq=0", f"trainer.default_local_dir={tmp_path}"]
    command = start(tmp_path, "train", "retool_tiny", *engines, *patience, *sizes, *steps)
    output = command.output(3 * START_S)
    assert command.process.returncode == 0, output
    assert command.leftovers() == []
    metrics = command.metrics()
    gaps = [metrics[step]["train/logprob_gap/max"] for step in (1, 2, 3) if "train/logprob_gap/max" in metrics[step]]
    assert gaps, "no step was trained on tokens of its own weights"
    assert max(gaps) < MAX_GAP_NATS
    assert sum(metrics[step].get("sync/pulls/count", 0) for step in (1, 2, 3)) >= 2  # what comes after the last step is not counted
