"""Training through sessions: the same processes, and what their ends do to the run."""

import pytest

from tests.runtime.command import start

pytestmark = pytest.mark.slow

ARGUMENTS = (
    "gen_actor_rollout_ref.rollout.agent.default_agent_loop=multi_turn_completion_agent",
    "trainer.total_training_steps=50",
    "trainer.val_before_train=false",
    "data.train_batch_size=4",
    "psrl.rollout_n=4",
    "trainer.test_freq=0",
    "trainer.trajectories_per_step=0",
)


def test_a_run_outlives_smg_and_ends_with_the_routers_name_where_the_router_dies(tmp_path):
    command = start(tmp_path, "train", "retool_tiny", *ARGUMENTS, f"trainer.default_local_dir={tmp_path}")
    command.wait_for_step(1)
    command.descendant("smg::router").kill()
    last = max(command.metrics())
    command.wait_for_step(last + 2)
    command.descendant("-m psrl.gateway ").kill()
    assert "ProcessDiedError: gateway: session router ended with code -9; last words: session router: http" in command.output()
    assert command.process.returncode == 1
    assert command.leftovers() == []
