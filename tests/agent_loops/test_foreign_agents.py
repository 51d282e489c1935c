"""Agents that nobody of psrl wrote play episodes on a real router; the policy's turns are scripted."""

import asyncio
import json
from itertools import pairwise

import pytest
from episode_kit import LastTurnScorer, ScriptedGenerator, make_rollout, make_task, make_ticket, renderer

from psrl.agent_loops import EpisodeRunner, LoopParts
from psrl.types import Outcome, Role
from tests.gateway.gateway_kit import running_gateway


def call(name, **arguments):
    return f"Let me do it.\n<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


FINAL = "The answer is \\boxed{7}."
SUMS = [call("add", a=3, b=4), call("add", a=7, b=0), FINAL]
SHELL = [call("bash", command="echo $((3 + 4))"), call("bash", command="printf 'COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n'")]


@pytest.fixture(autouse=True)
def _quiet_libraries(monkeypatch, tmp_path):
    """Prices and greetings, which the libraries would fetch and print when they are imported."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path))


def play(name, script):
    async def run():
        generator = ScriptedGenerator(script)
        async with running_gateway(renderer(), generator) as sessions:
            rollout = make_rollout(loop=f"foreign_agents.{name}", response_length=4000, prompt_length=4000)
            parts = LoopParts(renderer=renderer(), generator=generator, rollout=rollout, sessions=sessions)
            return await EpisodeRunner(parts, LastTurnScorer()).run(make_task(), make_ticket()), generator.requests

    episode, requests = asyncio.run(asyncio.wait_for(run(), timeout=120))
    assert (episode.result.outcome, episode.result.error) == (Outcome.FINISHED, None)
    return episode, requests


@pytest.mark.parametrize(
    ("name", "script", "observed"),
    [
        ("MiniSWEAgentLoop", SHELL, ["<returncode>0</returncode>\n<output>\n7\n</output>"]),
        ("PydanticAgentLoop", SUMS, ["7", "7"]),
        ("LlmCommandAgentLoop", SUMS, ["7", "7"]),
    ],
)
def test_an_unmodified_agent_plays_several_turns_with_tools_and_every_token_is_captured(name, script, observed):
    episode, requests = play(name, script)
    (trajectory,) = episode.result.trajectories
    assert [renderer().decode(step.sampled_ids) for step in trajectory.steps] == [f"{turn}<|im_end|>" for turn in script]
    for request, following in pairwise([*(request.token_ids for request in requests), trajectory.ids()]):
        assert following[: len(request)] == request
    assert [message.content for message in episode.result.messages if message.role is Role.TOOL] == observed
    assert episode.result.counts["turns"] == len(script)
    assert episode.score.reward == float("7" in script[-1])


def test_an_answer_that_an_agent_drops_from_its_history_is_a_branch_and_is_trained_on_once():
    """mini-swe-agent tells the policy that its turn had no call, and forgets the turn."""
    script = [SHELL[0], "I think the answer is 7.", SHELL[1]]
    episode, requests = play("MiniSWEAgentLoop", script)
    dropped, kept = episode.result.trajectories
    assert [renderer().decode(step.sampled_ids) for step in dropped.steps] == [f"{turn}<|im_end|>" for turn in script[:2]]
    assert [renderer().decode(step.sampled_ids) for step in kept.steps] == [f"{script[2]}<|im_end|>"]
    assert kept.ids()[: len(requests[2].token_ids)] == requests[2].token_ids
    assert "I think" not in renderer().decode(kept.ids())
    assert "No tool calls found" in renderer().decode(kept.ids())
