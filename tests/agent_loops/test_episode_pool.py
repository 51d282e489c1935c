"""Many episodes in one worker: choices by row, cancellation, bounds."""

import asyncio
from collections import Counter

import pytest
from episode_kit import EchoTool, LastTurnScorer, ScriptedGenerator, call_text, make_rollout, make_task, make_ticket, renderer

from psrl.agent_data import AgentDataParts, ConversationAgentData
from psrl.agent_loops import EpisodePool, EpisodeRunner, LoopParts
from psrl.agent_loops.deadline import OutOfTimeError, within
from psrl.agent_loops.multi_turn import MultiTurnAgentLoop
from psrl.environments import Environment, EnvironmentParts
from psrl.types import DataProto, Outcome, ParsedTurn


class Shout(Environment[str, str]):
    """Known by its dotted path only."""

    async def reset(self, task):
        return f"Shout {task.extra_info['word']}!", {}

    async def step(self, action):
        return "", float(action.isupper()), True, {}

    async def close(self):
        pass


class BuiltShout(Shout):
    @classmethod
    def build(cls, parts: EnvironmentParts):
        assert parts.multi_turn.max_turns == 8
        return cls()


class LoudData(ConversationAgentData[str]):
    def read_action(self, parsed: ParsedTurn) -> str:
        return parsed.content.upper()


class BuiltData(LoudData):
    @classmethod
    def build(cls, parts: AgentDataParts):
        return cls(parts)


class OneTurnLoop(MultiTurnAgentLoop):
    pass


class Waiting(Environment[str, str]):
    """Steps wait for ever; counts what is open."""

    open_now = 0
    num_opened = 0
    stepping: asyncio.Semaphore

    async def reset(self, task):
        type(self).open_now += 1
        type(self).num_opened += 1
        return "wait", {}

    async def step(self, action):
        self.stepping.release()
        await asyncio.Event().wait()

    async def close(self):
        await asyncio.sleep(0)
        type(self).open_now -= 1


def make_runner(script, *, tools=(), **rollout):
    generator = ScriptedGenerator(script)
    parts = LoopParts(renderer=renderer(), generator=generator, tools=tools, rollout=make_rollout(**rollout))
    return EpisodeRunner(parts, LastTurnScorer()), generator


def test_rows_of_a_dataproto_choose_their_own_loop_environment_and_data():
    tasks = [make_task(f"t{i}", extra_info={"word": "hi"}) for i in range(4)]
    columns = {
        **DataProto.from_tasks(tasks).non_tensor_batch,
        "env_class": [None, f"{__name__}.Shout", f"{__name__}.Shout", f"{__name__}.BuiltShout"],
        "data_class": [None, "conversation", f"{__name__}.LoudData", f"{__name__}.BuiltData"],
        "agent_name": [None, "generate_only_agent", "multi_turn_agent", f"{__name__}.OneTurnLoop"],
    }
    rows = DataProto(non_tensor_batch=columns).tasks()
    runner, _ = make_runner(["hello"], env="tool_env", data="tool_agent_data")

    async def play():
        return [await runner.run(task, make_ticket(f"e{i}")) for i, task in enumerate(rows)]

    results = [episode.result for episode in asyncio.run(play())]
    assert [result.error for result in results] == [None] * 4
    assert [result.step_rewards for result in results] == [(None,), (0.0,), (1.0,), (1.0,)]
    assert [result.messages[0].content for result in results] == ["What is 3 + 4?", "Shout hi!", "Shout hi!", "Shout hi!"]


def test_two_hundred_episodes_at_once_do_not_mix():
    def script(request):
        episode, _, turn = request.request_id.rpartition("-")
        return call_text(f"word of {episode}") if turn == "0" else f"{request.request_id} says \\boxed{{{episode}}}"

    runner, generator = make_runner(script, tools=[EchoTool()])
    pool = EpisodePool(runner, max_concurrent=200)

    async def play():
        return await asyncio.gather(*(pool.run(make_task(f"t{i}", ground_truth=f"{{e{i}}}"), make_ticket(f"e{i}")) for i in range(200)))

    episodes = asyncio.run(asyncio.wait_for(play(), timeout=60))
    assert runner.num_by_outcome == Counter({Outcome.FINISHED: 200})
    assert [episode.ticket.uid for episode in episodes] == [f"e{i}" for i in range(200)]
    assert {episode.score.reward for episode in episodes} == {1.0}
    for i, episode in enumerate(episodes):
        assert episode.result.messages[2].content == f"word of e{i}"
    assert len({request.sampling.seed for request in generator.requests}) == 2  # Seeds come from tickets alone, here all equal.


def play_waiting(num_episodes, max_concurrent, act):
    """Start episodes that wait in their step, wait until they do, then `act(pool, running)`."""

    async def play():
        Waiting.open_now = Waiting.num_opened = 0
        Waiting.stepping = asyncio.Semaphore(0)
        runner, _ = make_runner(lambda request: "go", env=f"{__name__}.Waiting", data="conversation")
        pool = EpisodePool(runner, max_concurrent=max_concurrent)
        running = [asyncio.ensure_future(pool.run(make_task(), make_ticket(f"e{i}"))) for i in range(num_episodes)]
        for _ in range(min(num_episodes, max_concurrent)):
            await Waiting.stepping.acquire()
        await act(pool, running)
        return runner, await asyncio.gather(*running, return_exceptions=True)

    return asyncio.run(asyncio.wait_for(play(), timeout=30))


def test_no_more_than_max_concurrent_episodes_are_open_and_closing_the_pool_closes_all():
    async def act(pool, running):
        assert (Waiting.open_now, len(pool.seconds_in_flight)) == (3, 3)
        await pool.close()

    runner, ends = play_waiting(10, 3, act)
    assert [type(end) for end in ends] == [asyncio.CancelledError] * 10
    assert (Waiting.open_now, Waiting.num_opened) == (0, 3)
    assert runner.num_by_outcome == Counter({Outcome.ABORTED: 3})


def test_cancelling_one_episode_closes_its_environment_and_makes_room():
    async def act(pool, running):
        assert pool.cancel("e0")
        assert pool.cancel("e0")  # Twice is not worse than once.
        assert not pool.cancel("unknown")
        await Waiting.stepping.acquire()  # e1 has begun.
        assert running[0].done()
        assert (Waiting.open_now, set(pool.seconds_in_flight)) == (1, {"e1"})
        await pool.close()

    _, ends = play_waiting(2, 1, act)
    assert [type(end) for end in ends] == [asyncio.CancelledError] * 2
    assert Waiting.open_now == 0


def test_cancelling_the_caller_closes_the_environment_before_the_cancellation_goes_on():
    async def act(pool, running):
        running[0].cancel()
        await asyncio.wait(running)
        assert Waiting.open_now == 0

    _, ends = play_waiting(1, 1, act)
    assert isinstance(ends[0], asyncio.CancelledError)


def test_work_that_ignores_its_cancellation_is_left_behind_and_named():
    async def stubborn(gate):
        while not gate.is_set():
            try:
                await gate.wait()
            except asyncio.CancelledError:
                continue

    async def play():
        gate = asyncio.Event()
        try:
            with pytest.raises(OutOfTimeError, match=r"the mule took longer than 0\.01 s and ignores its cancellation"):
                await within(stubborn(gate), timeout_s=0.01, what="the mule", grace_s=0.01)
        finally:
            gate.set()

    asyncio.run(asyncio.wait_for(play(), timeout=10))
