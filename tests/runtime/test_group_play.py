"""Groups that end early: by count, by order, by age; on the scripted engine over HTTP, down to its requests."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from psrl.agent_loops import EpisodePool, EpisodeRunner, LoopParts
from psrl.engine_client.client import HttpGenerator
from psrl.engines.scripted.script import ScriptedFailure, ScriptedTurn
from psrl.environments import Environment
from psrl.runtime.group_play import EndHow, GroupPlay
from psrl.types import Outcome, PolicyVersion
from tests.agent_loops.episode_kit import EchoTool, LastTurnScorer, call_text, ids_of, make_rollout, make_task, make_ticket, renderer
from tests.gateway.gateway_kit import running_gateway, scripted_engine, until

CALL, ANSWER = call_text("pong"), "The answer is \\boxed{7}"
SLOW_S = 0.02
"""Per token: a turn that takes seconds, so that what ends it is the test."""


def turn(text, **fields):
    return ScriptedTurn(token_ids=tuple(ids_of(text)), **fields)


def slow(text, **fields):
    return turn(text * 20, per_token_s=SLOW_S, **fields)


AFTER_CALL = {"when_prompt_contains": tuple(ids_of(CALL))}


class Stubborn(Environment[str, str]):
    """Closes when it is told to."""

    may_close = asyncio.Event()
    num_closed = 0

    async def reset(self, task):
        return "go", {}

    async def step(self, action):
        return "", None, True, {}

    async def close(self):
        await type(self).may_close.wait()
        type(self).num_closed += 1


class Stage:
    """A pool in front of a scripted engine."""

    def __init__(self, pool, core, scorer):
        self.pool, self.core, self.scorer = pool, core, scorer

    def group(self, size, *, num_needed=None, max_retries=0):
        tickets = tuple(make_ticket(f"train-0-0-e{index}", seed=index) for index in range(size))
        return GroupPlay(self.pool, make_task(), tickets, num_needed=num_needed or size, max_retries=max_retries)

    async def when_running(self, count):
        await until(lambda: self.core.load().num_running == count)


def play(body, *turns, max_concurrent=8, through_sessions=False, **rollout):
    @asynccontextmanager
    async def stage():
        async with scripted_engine(renderer(), *turns) as (url, core):
            generator = HttpGenerator([url], request_timeout_s=30.0, retry_for_s=0.0)
            loop = "multi_turn_completion_agent" if through_sessions else "multi_turn_agent"
            parts = LoopParts(renderer=renderer(), generator=generator, tools=[EchoTool()], rollout=make_rollout(loop=loop, **rollout))
            async with running_gateway(renderer(), generator) as sessions:
                scorer = LastTurnScorer()
                runner = EpisodeRunner(replace(parts, sessions=sessions), scorer)
                pool = EpisodePool(runner, max_concurrent=max_concurrent)
                try:
                    yield Stage(pool, core, scorer)
                finally:
                    await pool.close()
                    await generator.close()

    async def go():
        async with stage() as made:
            return await body(made)

    return asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize("through_sessions", [False, True], ids=["native", "sessions"])
def test_the_first_that_are_judged_make_the_group_and_the_slow_ones_request_is_gone_at_the_engine(through_sessions):
    async def body(stage):
        group = stage.group(3, num_needed=2)
        members = await group.run()
        await stage.when_running(0)
        await asyncio.gather(*group.left, return_exceptions=True)
        return members, stage.pool.seconds_in_flight, stage.core.load().num_sampled_tokens

    members, in_flight, num_sampled = play(body, turn(ANSWER), turn(ANSWER), slow(ANSWER), through_sessions=through_sessions)
    assert [member.episode.result.outcome for member in members] == [Outcome.FINISHED] * 2
    assert [member.episode.score.reward for member in members] == [1.0, 1.0]
    assert sorted({member.ticket.uid for member in members}) == [member.ticket.uid for member in members]
    assert in_flight == {}
    assert num_sampled < 3 * len(ids_of(ANSWER))


def test_of_more_than_enough_that_are_judged_at_once_the_first_tickets_are_kept():
    async def body(stage):
        return await stage.group(4, num_needed=2, max_retries=0).run()

    members = play(body, turn(ANSWER))
    assert len(members) == 2
    assert all(member.is_judged for member in members)


def test_a_member_that_fails_is_played_again_alone_and_told_when_it_never_works():
    async def body(stage):
        return await stage.group(2, max_retries=1).run(), await stage.group(2, max_retries=0).run()

    failing = ScriptedTurn(failure=ScriptedFailure.ERROR)
    again, told = play(body, turn(ANSWER), failing, turn(ANSWER), turn(ANSWER), failing)
    assert [member.episode.result.outcome for member in again] == [Outcome.FINISHED] * 2
    assert sorted(member.num_retries for member in again) == [0, 1]
    assert sorted(member.episode.result.outcome for member in told) == [Outcome.FINISHED, Outcome.INFRA_ERROR]


@pytest.mark.parametrize("through_sessions", [False, True], ids=["native", "sessions"])
def test_a_truncated_group_is_judged_by_its_finished_turns(through_sessions):
    async def body(stage):
        group = stage.group(2, max_retries=2)
        running = asyncio.create_task(group.run())
        await until(lambda: stage.core.load().num_sampled_tokens >= 2 * len(ids_of(CALL)) + 2)  # Both are in their second turn.
        group.end(EndHow.TRUNCATE)
        members = await running
        await stage.when_running(0)
        return members, len(stage.scorer.scored)

    members, num_scored = play(body, turn(CALL), slow(ANSWER, **AFTER_CALL), through_sessions=through_sessions)
    for member in members:
        result = member.episode.result
        assert result.outcome is Outcome.TIMEOUT
        assert member.episode.score.reward == 0.0
        assert [step.sampled_ids for step in result.trajectories[0].steps] == [ids_of(CALL)]
        assert "was ended early" in result.error
        assert member.num_retries == 0
    assert num_scored == 2


@pytest.mark.parametrize("through_sessions", [False, True], ids=["native", "sessions"])
def test_what_has_no_finished_turn_when_it_is_truncated_is_aborted_and_not_played_again(through_sessions):
    async def body(stage):
        group = stage.group(3, max_retries=2)
        running = asyncio.create_task(group.run())
        await stage.when_running(2)
        group.end(EndHow.TRUNCATE)
        return await running, stage.scorer.scored

    members, scored = play(body, slow(ANSWER), max_concurrent=2, through_sessions=through_sessions)
    ended = [member.episode and member.episode.result.outcome for member in members]
    assert ended == [Outcome.ABORTED, Outcome.ABORTED, None]  # The third waited for a place.
    assert not any(member.is_judged for member in members)
    assert scored == []


def test_a_group_that_is_ended_before_it_began_plays_nothing():
    async def body(stage):
        ends = []
        for how in EndHow:
            group = stage.group(2)
            group.end(how)
            ends += await group.run()
        return ends, stage.core.load().num_sampled_tokens

    members, num_sampled = play(body, turn(ANSWER))
    assert [member.episode for member in members] == [None] * 4
    assert num_sampled == 0


def test_a_cancelled_group_does_not_wait_for_its_environments_but_they_are_closed():
    async def body(stage):
        Stubborn.may_close, Stubborn.num_closed = asyncio.Event(), 0
        group = stage.group(2)
        running = asyncio.create_task(group.run())
        await stage.when_running(2)
        group.end(EndHow.TRUNCATE)
        group.end(EndHow.CANCEL)  # The stronger one counts, whichever came first.
        group.end(EndHow.TRUNCATE)
        members = await running
        assert (group.is_cancelled, len(group.left), Stubborn.num_closed) == (True, 2, 0)
        await stage.when_running(0)
        Stubborn.may_close.set()
        await asyncio.gather(*group.left, return_exceptions=True)
        return members, stage.pool.seconds_in_flight

    members, in_flight = play(body, slow(ANSWER), env=f"{__name__}.Stubborn", data="conversation")
    assert [member.episode for member in members] == [None, None]
    assert in_flight == {}
    assert Stubborn.num_closed == 2


def test_cancelling_whoever_plays_a_group_ends_its_members():
    async def body(stage):
        group = stage.group(2)
        running = asyncio.create_task(group.run())
        await stage.when_running(2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await stage.when_running(0)
        await asyncio.gather(*group.left, return_exceptions=True)
        return stage.pool.seconds_in_flight

    assert play(body, slow(ANSWER)) == {}


def test_the_oldest_version_of_a_group_is_that_of_its_oldest_token():
    async def body(stage):
        return await stage.group(1).run()

    (member,) = play(body, turn(ANSWER, new_version_at=(2, 5)))
    versions = member.episode.result.trajectories[0].steps[0].policy_versions
    assert versions[:6] == [0, 0, 1, 1, 1, 2]
    assert PolicyVersion(min(versions)) == 0
