"""mini-swe-agent is trained: `psrl train` with every part real, and what is left when an agent worker is killed."""

import asyncio
import json
import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
import yaml
from calc_project import PROBLEM, TEXT_YAML
from command import start

from psrl.telemetry.metric_log import read_metrics
from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.trajectories import read_trajectories
from psrl.types import Outcome
from tests.gateway.gateway_kit import until

pytestmark = pytest.mark.slow

TRAIN_LIMIT_S = 500
SETTINGS = """
gen_actor_rollout_ref:
  rollout:
    prompt_length: 256
    response_length: 384
    multi_turn: {{enable: true, max_turns: 3, max_tokens_per_turn: 32}}
    agent: {{default_agent_loop: mini_swe_agent, agent_loop_config_path: {folder}/agent.yaml, episode_timeout_s: 60, step_timeout_s: 30}}
train_actor_rollout_ref:
  model: {{path: "${{package:recipes/retool_tiny/model}}"}}
data: {{train_files: [{folder}/rows.jsonl], train_batch_size: 2, max_prompt_length: 256, shuffle: false}}
reward: {{name: execution}}
sandbox: {{packages: [pytest]}}
psrl: {{rollout_n: 2}}
trainer: {{total_training_steps: {steps}, test_freq: 0, default_local_dir: {folder}/runs}}
"""


def write_run(folder, *, steps):
    """The path of a recipe of two projects."""
    rows = [
        {
            "prompt": [{"role": "user", "content": PROBLEM.statement}],
            "data_source": "swe_tiny",
            "extra_info": {"swe": replace(PROBLEM, instance_id=f"calc-{number}").to_row()},
        }
        for number in range(2)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Whatever the untrained policy writes in one line is a command.
    (folder / "agent.yaml").write_text(yaml.safe_dump({**TEXT_YAML, "model": {**TEXT_YAML["model"], "action_regex": r"(.+)"}}))
    (folder / "mine.yaml").write_text(SETTINGS.format(folder=folder, steps=steps))
    return str(folder / "mine.yaml")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run folder of two steps."""
    folder = tmp_path_factory.mktemp("mini_swe")
    command = [sys.executable, "-m", "psrl", "train", write_run(folder, steps=2)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=TRAIN_LIMIT_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = RunFolder.latest(folder / "runs", "mine")
    assert found is not None
    return found


def test_every_episode_is_played_graded_and_recorded_with_what_it_handed_in(run):
    episodes = [record.episode for record in read_trajectories(run.trajectories / "train.jsonl")]
    assert len(episodes) == 2 * 2 * 2
    for episode in episodes:
        assert episode.result.outcome in set(Outcome) - {Outcome.INFRA_ERROR, Outcome.ABORTED}, episode.result.error
        assert episode.score.reward is not None
        assert episode.result.submission is not None
        assert episode.result.counts["env/sandbox_start_s"] > 0
    assert sum(episode.result.counts["env/commands"] for episode in episodes) > 0


def test_engine_and_trainer_agree_on_every_token(run):
    metrics = read_metrics(run.metrics)
    for step in (1, 2):
        assert metrics[step]["train/logprob_gap/max"] < 1e-3
        assert metrics[step]["episode/outcome/infra_error"] == 0


def test_nothing_is_left_of_an_agent_worker_that_was_killed(tmp_path):
    """Its warm process, the agents of its episodes and their sandboxes; the run ends and says which worker it was."""
    command = start(tmp_path / "out", "train", write_run(tmp_path, steps=1000))
    try:
        while not any(has_word(child, "mini_swe_process") for child in command.look()):
            assert command.process.poll() is None, command.log()
        worker = command.descendant("AgentWorker")
        worker.kill()
        output = command.output()
    finally:
        command.process.kill()
    assert "agent worker 0" in output
    asyncio.run(until(lambda: not any(is_running(process) for process in command.seen.values())))


def has_word(process, word):
    try:
        return word in " ".join(process.cmdline())
    except psutil.Error:
        return False


def is_running(process):
    """A zombie is gone: whoever inherited it may never ask for its exit code."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
