"""docs/mini_swe.md: its settings load as printed, and its agent plays."""

import asyncio
import re
from pathlib import Path

import pytest
from calc_project import PROBLEM
from episode_kit import LastTurnScorer
from mini_swe_kit import MEND, call, play_episode, swe_task

from psrl.config.agent_yaml import TYPES, read_agent_yaml
from psrl.config.load import load_config
from psrl.types import Outcome

PAGE = Path(__file__).parent.parent.parent / "docs" / "mini_swe.md"


@pytest.fixture
def files(tmp_path, monkeypatch):
    """Every file of the page by name, in a folder."""
    found = re.findall(r"^```yaml\n(# (\S+?\.yaml).*?\n.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [name for _, name in found] == ["swe_run.yaml", "agent.yaml", "native.yaml"]
    for text, name in found:
        (tmp_path / name).write_text(text)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_settings_of_the_page_load_both_ways(files):
    config = load_config("./swe_run.yaml")
    assert config.gen_actor_rollout_ref.rollout.agent.default_agent_loop == "mini_swe_agent"
    settings = read_agent_yaml(config.gen_actor_rollout_ref.rollout.agent.agent_loop_config_path)
    assert (settings.task_kind, settings.timeout, settings.is_textbased) == ("swe", 60, False)
    native = (files / "native.yaml").read_text().replace("# native.yaml", "defaults: [swe_run, _self_]\n#")
    (files / "both.yaml").write_text(native)
    agent = load_config("./both.yaml").gen_actor_rollout_ref.rollout.agent
    assert (agent.default_agent_loop, agent.env.name, agent.data.name) == ("multi_turn_agent", "mini_swe_env", "mini_swe_agent_data")


def test_the_agent_of_the_page_mends_a_project(files):
    turns = [call(MEND), call("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]
    episode = asyncio.run(asyncio.wait_for(play_episode(str(files / "agent.yaml"), turns, LastTurnScorer(), task=swe_task()), 60))
    assert (episode.result.outcome, episode.result.submission.text) == (Outcome.FINISHED, "")
    assert "+    return a + b" in episode.result.submission.patch
    assert f"{PROBLEM.statement}\n\nWork in /testbed." in episode.result.messages[1].content


def test_every_key_of_the_file_is_on_the_page():
    text = PAGE.read_text()
    for key in TYPES:
        assert f"`{key}`" in text or f"`{key.partition('.')[2]}`" in text, key
