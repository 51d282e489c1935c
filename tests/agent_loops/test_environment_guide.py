"""The example of psrl/environments/README.md, exactly as printed, in an empty folder."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest
from episode_kit import ScriptedGenerator, make_ticket, renderer

import psrl.environments
from psrl.agent_loops import EpisodeRunner, LoopParts
from psrl.config.load import load_config
from psrl.rewards.base import ScorerParts
from psrl.rewards.scorer import EnvironmentScorer
from psrl.sandbox import BackendSandboxes
from psrl.types import Outcome

GUIDE = Path(psrl.environments.__file__).parent / "README.md"
MODEL_KEY = "train_actor_rollout_ref.model.path"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The guide's files, and a stand-in for the shipped model, of which settings need only the name."""
    for language, name in (("python", "sum_game.py"), ("yaml", "sum_game.yaml")):
        (block,) = re.findall(rf"^```{language}\n(# {re.escape(name)}\n.*?)^```$", GUIDE.read_text(), flags=re.DOTALL | re.MULTILINE)
        (tmp_path / name).write_text(block)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("sum_game", None)


def test_the_check_passes_as_the_guide_says(folder):
    done = subprocess.run([sys.executable, "sum_game.py"], cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert len(lines) == 2
    assert all(line.endswith(": ok") for line in lines)
    assert "4 done" in lines[0]


@pytest.mark.parametrize(
    ("turns", "reward", "accuracy", "num_turns"),
    [
        (["The answer is \\boxed{%d}."], 1.0, 1.0, 1),
        (["\\boxed{0}", "\\boxed{1} no, \\boxed{%d}"], 1.0, 1.0, 2),
        # Sums are at least 20: an answer of -1 is off by more than 20, and a box that is no number ends the game.
        (["\\boxed{-1}", "\\boxed{" + "9" * 15 + "}"], 0.0, 0.0, 2),
        (["I do not know."], 0.0, 0.0, 1),
    ],
)
def test_an_episode_of_the_guide_s_settings_is_rewarded_as_the_guide_says(folder, turns, reward, accuracy, num_turns):
    config = load_config("./sum_game.yaml", [f"{MODEL_KEY}={folder / 'model'}"])
    rollout = config.gen_actor_rollout_ref.rollout
    from sum_game import Sums

    (task,) = Sums().train_tasks(1, seed=3)
    script = [text % task.ground_truth if "%d" in text else text for text in turns]
    assert config.reward.name == "environment"
    scorer = EnvironmentScorer(ScorerParts(reward=config.reward, sandboxes=BackendSandboxes(config.sandbox)))

    async def play():
        parts = LoopParts(renderer=renderer(), generator=ScriptedGenerator(script), rollout=rollout)
        try:
            return await EpisodeRunner(parts, scorer).run(task, make_ticket())
        finally:
            await scorer.close()

    episode = asyncio.run(asyncio.wait_for(play(), timeout=30))
    assert (episode.result.outcome, episode.result.error) == (Outcome.FINISHED, None)
    assert (episode.score.reward, episode.score.accuracy) == (reward, accuracy)
    assert episode.result.trajectories[0].num_turns == num_turns
    if num_turns == 2:
        assert episode.result.messages[-2].content == "Too low."


def test_no_validation_sum_is_trained_on(folder):
    from sum_game import Sums

    train = {task.prompt for task in Sums().train_tasks(2000, seed=1)}
    val = [task.prompt for task in Sums().val_tasks(500, seed=1)]
    assert len(set(val)) == 500
    assert not train & set(val)
