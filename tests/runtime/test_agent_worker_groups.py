"""The plain object of an agent worker plays groups: rows, versions, attempts, ends and moves; on scripted engines over HTTP."""

import asyncio
import random
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from psrl.config.load import load_config
from psrl.data_plane import MemoryDataPlane
from psrl.engines.scripted.script import ScriptedFailure, ScriptedTurn
from psrl.environments import Environment
from psrl.runtime.build import agent_worker_settings
from psrl.runtime.groups import AgentWorker, EndHow, Endpoints, GroupRequest
from psrl.runtime.tickets import training_tickets, validation_tickets
from psrl.types import GroupUid, Outcome, PolicyVersion
from tests.agent_loops.episode_kit import call_text, make_task
from tests.gateway.gateway_kit import sampled_ids, scripted_engine, until

pytestmark = pytest.mark.slow

ANSWER = "The answer is \\boxed{7}"
CALL = call_text("print(3 + 4)").replace('"echo"', '"code_interpreter"').replace('"text"', '"code"')
TASK = make_task("train-0-0")
GROUP = GroupUid("train-0-0")


class Slow(Environment[str, str]):
    """Closes when it is told to."""

    may_close = asyncio.Event()
    num_closed = 0

    async def reset(self, task):
        return "go", {}

    async def step(self, action):
        return "", 1.0, True, {}

    async def close(self):
        await type(self).may_close.wait()
        type(self).num_closed += 1


class Stage:
    def __init__(self, worker, plane, cores):
        self.worker, self.plane, self.cores = worker, plane, cores

    @property
    def num_sampled(self):
        return sum(core.load().num_sampled_tokens for core in self.cores)

    async def when_running(self, count, *, at=0):
        await until(lambda: self.cores[at].load().num_running == count)


def scripted_turn(renderer, text, **fields):
    """A turn that says `text`, or fails after it."""
    ids = tuple(sampled_ids(renderer, text))
    return ScriptedTurn(when_prompt_contains=ids, **fields) if "failure" in fields else ScriptedTurn(token_ids=ids, **fields)


def play(body, *turns_of_engines, retry_for_s=60.0, **changes):
    """A worker of the tiny recipe in front of scripted engines; an engine's turns are (text, fields of the ScriptedTurn)."""
    settings = replace(agent_worker_settings(load_config("retool_tiny")), **changes)
    settings.gen_rollout.startup_timeout_s = retry_for_s

    @asynccontextmanager
    async def engines(renderer, turns_of_engines):
        if not turns_of_engines:
            yield []
            return
        turns = [scripted_turn(renderer, text, **fields) for text, fields in turns_of_engines[0]]
        async with scripted_engine(renderer, *turns) as first, engines(renderer, turns_of_engines[1:]) as others:
            yield [first, *others]

    async def go():
        plane = MemoryDataPlane()
        worker = AgentWorker(settings, data_plane=plane)
        try:
            await worker.start()
            async with engines(worker._renderer, turns_of_engines) as served:
                await worker.connect(Endpoints(generate_urls=[url for url, _ in served]))
                return await body(Stage(worker, plane, [core for _, core in served]))
        finally:
            await worker.stop()

    return asyncio.run(asyncio.wait_for(go(), 120))


def request(size, *, task=TASK, attempt=0, instances=None, **fields):
    tickets = training_tickets(task, rollout_n=size, version=PolicyVersion(4), run_seed=1, instances=instances, attempt=attempt)
    return GroupRequest(task=task, tickets=tickets, wants_records=True, attempt=attempt, **fields)


def test_the_rows_of_a_group_are_those_of_the_kept_members_and_say_their_oldest_version():
    async def body(stage):
        return await stage.worker.run_group(request(3, num_needed=2, attempt=1)), stage.plane.keys()

    fast = (ANSWER, {"new_version_at": (2, 4)})
    result, keys = play(body, [fast, (ANSWER, {"new_version_at": (0, 0)}), (ANSWER * 10, {"per_token_s": 0.05})])
    assert [summary.outcome for summary in result.summaries] == [Outcome.FINISHED] * 2
    assert [f"{summary.uid}-t0" for summary in result.summaries] == result.meta.keys == sorted(keys)
    assert [record.ticket.uid for record in result.records] == [summary.uid for summary in result.summaries]
    assert sorted(tags["oldest_version"] for tags in result.meta.tags) == [0, 2]
    assert (result.oldest_version, result.attempt, result.num_surplus, len(result.rewards)) == (0, 1, 1, 2)


def test_the_oldest_version_of_a_group_is_of_what_is_trained_on():
    """A member that failed in its second turn had sampled its first from older weights; nothing of it is trained on."""

    async def body(stage):
        return await stage.worker.run_group(request(2))

    turns = [(CALL, {}), (ANSWER, {"new_version_at": (0,)}), (CALL, {"failure": ScriptedFailure.ERROR})]
    result = play(body, turns, max_episode_retries=0, retry_for_s=0.0)
    assert sorted(summary.outcome for summary in result.summaries) == [Outcome.FINISHED, Outcome.INFRA_ERROR]
    assert sorted(summary.num_turns for summary in result.summaries) == [1, 1]
    assert (len(result.meta.keys), result.oldest_version) == (1, 1)


def test_a_cancelled_group_leaves_no_row_and_its_next_attempt_waits_until_it_has_closed():
    async def body(stage):
        Slow.may_close, Slow.num_closed = asyncio.Event(), 0
        task = replace(TASK, env_class=f"{__name__}.Slow", data_class="conversation")
        first = asyncio.create_task(stage.worker.run_group(request(2, task=task)))
        await stage.when_running(2)
        assert not await stage.worker.end_group(GroupUid("another"), EndHow.CANCEL)
        assert await stage.worker.end_group(GROUP, EndHow.CANCEL)
        cancelled = await first
        assert Slow.num_closed == 0
        second = asyncio.create_task(stage.worker.run_group(request(2, task=task, attempt=1)))
        Slow.may_close.set()
        return cancelled, await second, stage.plane.keys(), Slow.num_closed

    cancelled, again, keys, num_closed = play(body, [(ANSWER * 10, {"per_token_s": 0.05})] * 2 + [(ANSWER, {})] * 2)
    assert [summary.outcome for summary in cancelled.summaries] == [Outcome.ABORTED] * 2
    assert (cancelled.meta.keys, cancelled.records, cancelled.oldest_version, cancelled.rewards) == ([], (), None, [])
    assert [summary.outcome for summary in again.summaries] == [Outcome.FINISHED] * 2
    assert sorted(keys) == again.meta.keys
    assert num_closed == 4


def test_a_truncated_group_is_kept_with_its_finished_turns():
    async def body(stage):
        playing = asyncio.create_task(stage.worker.run_group(request(2)))
        await stage.when_running(2)  # The calls are answered at once: both are in their second turn.
        assert await stage.worker.end_group(GROUP, EndHow.TRUNCATE)
        return await playing

    turns = [(CALL, {})] * 2 + [(ANSWER * 10, {"per_token_s": 0.05})] * 2
    result = play(body, turns)
    assert [summary.outcome for summary in result.summaries] == [Outcome.TIMEOUT] * 2
    assert [summary.num_turns for summary in result.summaries] == [1, 1]
    assert len(result.rewards) == len(result.meta.keys) == 2


def test_a_group_moves_with_its_running_turns_and_stays_where_it_went():
    async def body(stage):
        playing = asyncio.create_task(stage.worker.run_group(request(2, instances=(0, 0))))
        await stage.when_running(2)
        assert await stage.worker.move_group(GroupUid("another"), 1) == 0
        assert await stage.worker.move_group(GROUP, 1) == 2
        return await playing, [core.load() for core in stage.cores]

    result, (source, target) = play(body, [(ANSWER * 10, {"per_token_s": 0.05})], [(ANSWER, {})])
    assert [summary.outcome for summary in result.summaries] == [Outcome.FINISHED] * 2
    assert [summary.counts["resumed_turns"] for summary in result.summaries] == [1, 1]
    assert (source.num_running, target.num_running) == (0, 0)
    assert target.num_sampled_tokens > 0


@pytest.mark.parametrize("seed", range(3))
def test_groups_that_end_at_random_leave_nothing_behind(seed):
    """Eighty groups, eight at once: some have redundant members, some are cancelled, truncated or moved at some moment."""
    draw = random.Random(seed)

    async def one_group(stage, number, room):
        async with room:
            size = draw.randint(1, 4)
            uid = f"train-0-{number}"
            task = replace(TASK, uid=uid, env_class=None)
            needed, instances = draw.randint(1, size), [draw.randrange(2) for _ in range(size)]
            playing = asyncio.create_task(stage.worker.run_group(request(size, task=task, num_needed=needed, instances=instances)))
            for _ in range(draw.randint(0, 2)):
                num_sampled = stage.num_sampled + draw.randint(1, 300)
                await until(lambda at=num_sampled: playing.done() or stage.num_sampled >= at)
                act = draw.choice(["move", EndHow.CANCEL, EndHow.TRUNCATE, EndHow.TRUNCATE])
                if act == "move":
                    await stage.worker.move_group(GroupUid(uid), draw.randrange(2))
                else:
                    await stage.worker.end_group(GroupUid(uid), act)
            result = await playing
            assert len(result.rewards) <= needed
            assert [f"{record.ticket.uid}-t0" for record in result.records if record.score.reward is not None] == result.meta.keys
            assert not result.is_cancelled or not result.meta.keys
            assert result.num_surplus + len(result.summaries) == size
            if len(result.rewards) < needed and not result.is_cancelled:
                assert result.num_surplus == 0
                assert {summary.outcome for summary in result.summaries if summary.reward is None} | {Outcome.ABORTED} == {Outcome.ABORTED}
            return result

    async def body(stage):
        room = asyncio.Semaphore(8)
        results = await asyncio.gather(*(one_group(stage, number, room) for number in range(80)))
        worker = stage.worker
        for core in stage.cores:
            await until(lambda core=core: core.load().num_running + core.load().num_waiting == 0)
        await until(lambda: not worker._leaving)
        assert (worker._plays, worker._train_pool.seconds_in_flight, worker._train_pool._tasks) == ({}, {}, {})
        assert worker._train_pool._runner._parts.truncations._orders == {}
        generator = worker._generator
        assert (generator._replica_of, generator._in_flight, set(generator._num_sessions.values())) == ({}, {}, {0})
        assert sorted(stage.plane.keys()) == sorted(key for result in results for key in result.meta.keys)
        return results

    slow, call = (ANSWER * 3, {"per_token_s": 0.01}), (CALL, {})
    results = play(body, [call, slow, (ANSWER, {}), call, slow], [slow, call, (ANSWER, {})])
    assert sum(result.is_cancelled for result in results) >= 1
    assert sum(result.num_surplus for result in results) >= 1
    outcomes = Counter(summary.outcome for result in results for summary in result.summaries)
    assert min(outcomes[outcome] for outcome in (Outcome.FINISHED, Outcome.TIMEOUT, Outcome.ABORTED)) >= 1, outcomes


def test_validation_puts_no_row_into_the_data_plane():
    async def body(stage):
        tickets = validation_tickets(TASK, num_sampled=2, is_greedy_too=True, version=PolicyVersion(1), run_seed=1)
        result = await stage.worker.run_group(GroupRequest(task=TASK, tickets=tickets, wants_records=False))
        return result, stage.plane.keys()

    result, keys = play(body, [(ANSWER, {})])
    assert [summary.outcome for summary in result.summaries] == [Outcome.FINISHED] * 3
    assert (keys, result.meta.keys, result.records) == ([], [], ())
