"""The examples of docs/agent_loops.md, exactly as printed."""

import asyncio
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from episode_kit import LastTurnScorer, ScriptedGenerator, make_ticket

import psrl
from psrl.agent_loops import EpisodeRunner, LoopParts
from psrl.chat import load_renderer
from psrl.config.load import load_config
from psrl.datasets.generators import build_generator
from psrl.types import Outcome, Role
from tests.gateway.gateway_kit import scripted_gateway

PAGE = Path(__file__).parent.parent.parent / "docs" / "agent_loops.md"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Every file of the page."""
    files = re.findall(r"^```(?:python|yaml)\n(# (\S+)\n.*?)^```$", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [name for _, name in files] == ["adding_agent.py", "adding_agent.yaml", "command_agent.py"]
    for text, name in files:
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("adding_agent", None)
    sys.modules.pop("command_agent", None)


def play(loop, rollout, *script, task):
    """An episode on the shipped model's tokenizer, whose turns are `script`."""
    renderer = load_renderer(rollout_model(), tool_format="hermes")

    async def run():
        async with scripted_gateway(renderer, *script) as (sessions, _):
            parts = LoopParts(renderer=renderer, generator=ScriptedGenerator([]), rollout=rollout, sessions=sessions)
            return await EpisodeRunner(parts, LastTurnScorer()).run(replace(task, agent_name=loop), make_ticket())

    episode = asyncio.run(asyncio.wait_for(run(), timeout=60))
    assert (episode.result.outcome, episode.result.error) == (Outcome.FINISHED, None)
    return episode


def rollout_model():
    return str(Path(psrl.__file__).parent / "recipes" / "retool_tiny" / "model")


def test_the_agent_of_the_page_plays_with_the_page_s_settings(folder):
    config = load_config("./adding_agent.yaml")
    rollout = config.gen_actor_rollout_ref.rollout
    assert config.train_actor_rollout_ref.model.path == rollout_model()
    (task,) = build_generator(config.data.generator.name).train_tasks(1, seed=3)
    call = f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': {'a': 3, 'b': 4}})}\n</tool_call>"
    episode = play(rollout.agent.default_agent_loop, rollout, call, f"\\boxed{{{task.ground_truth}}}", task=task)
    assert [message.role for message in episode.result.messages] == [Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
    assert episode.result.messages[:2] == task.prompt
    assert episode.result.messages[3].content == "7"
    assert (episode.result.trajectories[0].num_turns, episode.score.reward) == (2, 1.0)


def test_the_command_of_the_page_finds_its_task_in_its_folder(folder, monkeypatch):
    program = folder / "my-agent"
    program.write_text(f"#!{sys.executable}\n{MY_AGENT}")
    program.chmod(0o755)
    from command_agent import MyCommandAgentLoop

    command = MyCommandAgentLoop.command
    monkeypatch.setattr(MyCommandAgentLoop, "command", lambda *given: [str(program), *command(*given)[1:]])
    rollout = load_config("./adding_agent.yaml").gen_actor_rollout_ref.rollout
    (task,) = build_generator("arithmetic").train_tasks(1, seed=3)
    episode = play("command_agent.MyCommandAgentLoop", rollout, f"{task.ground_truth}", task=task)
    assert episode.result.messages[0].content == task.prompt[-1].content


MY_AGENT = """
import json, os, sys, urllib.request
assert sys.argv[1:4] == ["--model", "policy", "--task-file"]
body = json.dumps({"messages": [{"role": "user", "content": open(sys.argv[4]).read()}]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30).read()
"""
