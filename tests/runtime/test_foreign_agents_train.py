"""Three agents that nobody of psrl wrote, unmodified, are trained: two steps through `psrl train`, with every part real."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from psrl.telemetry.metric_log import read_metrics
from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.trajectories import read_trajectories
from psrl.types import Outcome

pytestmark = pytest.mark.slow

AGENTS = Path(__file__).parent.parent / "agent_loops" / "foreign_agents.py"
LOOPS = ("MiniSWEAgentLoop", "PydanticAgentLoop", "LlmCommandAgentLoop")
TRAIN_LIMIT_S = 500
ROLLOUT_N = 2
SETTINGS = """
gen_actor_rollout_ref:
  rollout:
    prompt_length: 192
    response_length: 384
    multi_turn: {enable: true, max_turns: 4, max_tokens_per_turn: 48}
    agent: {default_agent_loop: foreign_agents.PydanticAgentLoop, episode_timeout_s: 90, step_timeout_s: 90}
train_actor_rollout_ref:
  model: {path: "${package:recipes/retool_tiny/model}"}
data: {train_files: [rows.jsonl], train_batch_size: 3, max_prompt_length: 64, shuffle: false}
reward: {name: math_answer}
psrl: {rollout_n: 2, rollout_gateway: {enable: true}}
trainer: {total_training_steps: 2, test_freq: 0}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run folder of two steps, in each of which each agent plays a group; and what the run printed."""
    folder = tmp_path_factory.mktemp("foreign")
    shutil.copy(AGENTS, folder)
    (folder / "foreign.yaml").write_text(SETTINGS)
    rows = [
        {
            "prompt": [{"role": "system", "content": "Answer in \\boxed{}."}, {"role": "user", "content": f"What is {number} + 4?"}],
            "data_source": "sums",
            "reward_model": {"style": "rule", "ground_truth": str(number + 4)},
            "agent_name": f"foreign_agents.{loop}",
        }
        for number in (3, 5)
        for loop in LOOPS
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # What the libraries would fetch and print when they are imported.
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1", "MSWEA_GLOBAL_CONFIG_DIR": str(folder / "mini")}
    command = [sys.executable, "-m", "psrl", "train", "./foreign.yaml"]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **quiet}, capture_output=True, text=True, timeout=TRAIN_LIMIT_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = RunFolder.latest(folder / "runs", "foreign")
    assert found is not None
    return found


def test_each_agent_plays_in_each_step_and_every_episode_has_its_turns(run):
    records = list(read_trajectories(run.trajectories / "train.jsonl"))
    for step in (1, 2):
        played = [record.episode for record in records if record.step == step]
        by_agent = {loop: [episode for episode in played if episode.task.agent_name == f"foreign_agents.{loop}"] for loop in LOOPS}
        for loop, episodes in by_agent.items():
            assert len(episodes) == ROLLOUT_N, loop
            for episode in episodes:
                assert episode.result.outcome in set(Outcome) - {Outcome.INFRA_ERROR, Outcome.ABORTED}, episode.result.error
                assert sum(trajectory.num_turns for trajectory in episode.result.trajectories) == episode.result.counts["turns"] >= 1


def test_engine_and_trainer_agree_on_every_token_that_an_agent_made_the_policy_sample(run):
    metrics = read_metrics(run.metrics)
    for step in (1, 2):
        assert metrics[step]["train/logprob_gap/max"] < 1e-3
        assert metrics[step]["episode/outcome/infra_error"] == 0
