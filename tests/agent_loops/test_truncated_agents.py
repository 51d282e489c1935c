"""Black-box agents that psrl ends early: what their sessions have captured is the episode."""

import asyncio
import json
import sys
import urllib.request

import pytest
from calc_project import TEXT_YAML
from episode_kit import LastTurnScorer, ScriptedGenerator, make_rollout, make_task, make_ticket, renderer
from mini_swe_kit import MEND, agent_processes, block, play_episode, sandbox_processes, write_yaml
from test_mini_swe_episodes import CHANGES, changed_lines
from test_session_episodes import Hanging, ask

from psrl.agent_loops import AgentEnd, CommandAgentLoop, EpisodePool, EpisodeRunner, LoopParts, SessionAgentLoop
from psrl.agent_loops.base import Failure
from psrl.agent_loops.deadline import Truncations
from psrl.agent_loops.session import _outcome_of
from psrl.types import EpisodeUid, Outcome, SessionId, SessionRecord
from tests.gateway.gateway_kit import running_gateway, until

FINAL = "The answer is \\boxed{7}."
UID = make_ticket().uid


class Talkative(SessionAgentLoop):
    """Asks for ever."""

    async def run_agent(self, task, address):
        messages = [task.prompt[-1].content]
        while True:
            messages += [await ask(address, *messages), "go on"]


class TalkativeThread(SessionAgentLoop):
    """The same in a thread that blocks."""

    def run_agent(self, task, address):
        headers = {"authorization": f"Bearer {address.api_key}", "content-type": "application/json"}
        messages = [{"role": "user", "content": task.prompt[-1].content}]
        while True:
            body = json.dumps({"messages": messages}).encode()
            request = urllib.request.Request(f"{address.base_url}/chat/completions", body, headers)
            with urllib.request.urlopen(request, timeout=30) as answer:
                messages += [json.load(answer)["choices"][0]["message"], {"role": "user", "content": "go on"}]


PROGRAM = """
import json, os, urllib.request
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
messages = [{"role": "user", "content": "hi"}]
while True:
    body = json.dumps({"messages": messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)) as answer:
        messages += [json.load(answer)["choices"][0]["message"], {"role": "user", "content": "go on"}]
"""


class TalkativeCommand(CommandAgentLoop):
    """The same as a command."""

    def command(self, task, address, folder):
        return [sys.executable, "-c", PROGRAM]


def play(loop_class, generator, meanwhile):
    """One episode in a pool; `meanwhile(pool)` runs beside it."""

    async def run():
        async with running_gateway(renderer(), generator, max_sessions=1) as sessions:
            rollout = make_rollout(loop=f"{__name__}.{loop_class.__name__}", max_turns=50)
            parts = LoopParts(renderer=renderer(), generator=generator, rollout=rollout, sessions=sessions)
            pool = EpisodePool(EpisodeRunner(parts, LastTurnScorer()), max_concurrent=1)
            work = asyncio.ensure_future(pool.run(make_task(), make_ticket()))
            await meanwhile(pool)
            return await work

    return asyncio.run(asyncio.wait_for(run(), timeout=60))


@pytest.mark.parametrize("loop_class", [Talkative, TalkativeThread, pytest.param(TalkativeCommand, marks=pytest.mark.slow)])
def test_a_truncated_agent_is_judged_by_the_turns_that_its_session_has(loop_class):
    generator = Hanging([FINAL, FINAL, FINAL], num_answered=2)

    async def truncate(pool):
        await until(lambda: len(generator.requests) == 3)
        assert pool.truncate(UID)
        assert not pool.truncate("unknown")

    episode = play(loop_class, generator, truncate)
    assert (episode.result.outcome, episode.score.reward) == (Outcome.TIMEOUT, 1.0)
    assert "was ended early" in episode.result.error
    assert episode.result.trajectories[0].num_turns == 2
    assert generator.num_cancelled == 1


def test_an_agent_that_has_no_turn_when_it_is_truncated_is_aborted():
    generator = Hanging([])

    async def truncate(pool):
        await until(lambda: len(generator.requests) == 1)
        assert pool.truncate(UID)

    episode = play(Talkative, generator, truncate)
    assert (episode.result.outcome, episode.score.reward) == (Outcome.ABORTED, None)


def record(**fields):
    return SessionRecord(id=SessionId("s"), uid=EpisodeUid("e"), trajectories=(), messages=(), turn_texts=(), num_turns=2, **fields)


@pytest.mark.parametrize(
    "end",
    [
        Failure(outcome=Outcome.TIMEOUT, error="ended early", name="TruncatedError", is_truncation=True),
        AgentEnd(outcome=Outcome.TIMEOUT, is_truncation=True),
    ],
    ids=["failure", "end"],
)
def test_a_truncated_agent_that_waited_for_engines_most_of_its_time_is_judged_all_the_same(end):
    """The session says infra_error where its client left after twenty seconds of waiting; here psrl made it leave."""
    waiting = record(end=Outcome.INFRA_ERROR, error="the agent gave up on a turn", generation_s=90.0)
    assert _outcome_of(end, waiting, 100.0) == (Outcome.TIMEOUT, None)
    assert _outcome_of(end, record(generation_s=90.0), 100.0) == (Outcome.TIMEOUT, None)
    assert _outcome_of(end, record(end=Outcome.MAX_TOKENS, error="cut"), 100.0) == (Outcome.MAX_TOKENS, "cut")


@pytest.mark.slow
def test_a_truncated_mini_swe_agent_hands_in_what_it_mended_so_far(tmp_path):
    generator, truncations = ScriptedGenerator([block(MEND), block("sleep 60")]), Truncations()

    async def truncate(work):
        await until(lambda: len(generator.requests) == 2)
        truncations.of(UID).set()

    path = write_yaml(tmp_path, {**TEXT_YAML, "environment": {**TEXT_YAML["environment"], "timeout": 90}})
    playing = play_episode(path, None, LastTurnScorer(), generator=generator, meanwhile=truncate, truncations=truncations)
    result = asyncio.run(asyncio.wait_for(playing, 60)).result
    assert (agent_processes(), sandbox_processes()) == ([], [])
    assert result.outcome is Outcome.TIMEOUT
    assert "mini-swe-agent was ended early" in result.error
    assert changed_lines(result.submission.patch) == CHANGES
    assert result.trajectories[0].num_turns == 2
