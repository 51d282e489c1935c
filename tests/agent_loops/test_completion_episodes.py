"""The completion loop on a real router: the native loop's episodes, turn by turn through chat completions."""

import asyncio
from dataclasses import replace

import pytest
from episode_kit import (
    EchoTool,
    LastTurnScorer,
    Reply,
    ScriptedGenerator,
    call_text,
    ids_of,
    make_rollout,
    make_task,
    make_ticket,
    renderer,
)

from psrl.agent_loops import EpisodeRunner, LoopParts
from psrl.agent_loops.completion import as_captured, num_differing_tokens
from psrl.errors import ConfigError, EngineError
from psrl.types import FinishReason, LoopResult, Outcome, Role, SessionId, SessionRecord, Step, Trajectory, TrajectoryUid
from tests.gateway.gateway_kit import running_gateway

FINAL = "The answer is \\boxed{7}."
COMPLETION = "multi_turn_completion_agent"
SCRIPTS = {
    "one turn": [FINAL],
    "a call": [call_text("seven"), FINAL],
    "words around calls, two calls": [f"  Let me see.\n{call_text('a')}\n{call_text('b')}  ", FINAL],
    "white space to trim": [call_text("seven") + " \n", f"\n\n {FINAL} \n"],
    "an unknown tool": [call_text("seven", tool="no_such"), FINAL],
    "a call that cannot be read": ["I try <tool_call>\n{broken\n</tool_call> again", FINAL],
    "a call that is not closed": ['<tool_call>\n{"name": "echo", "arguments": {"text": "x"}}', FINAL],
    "a broken and a good call": [f"<tool_call>\n[1, 2]\n</tool_call>\n{call_text('good')}", FINAL],
    "characters of many bytes": [call_text("né 日本 🙂 \\n"), f"naïve 🙂 {FINAL}"],
    "a cut turn": [call_text("seven"), Reply(call_text("never"), FinishReason.LENGTH)],
    "too many turns": [call_text("seven")] * 3,
}


def play(script, loop, *, tools=None, task=None, ticket=None, **rollout):
    """One episode; (episode, requests that reached the engine, sessions still open)."""

    async def run():
        generator = ScriptedGenerator(script)
        async with running_gateway(renderer(), generator) as sessions:
            parts = LoopParts(
                renderer=renderer(),
                generator=generator,
                tools=[EchoTool()] if tools is None else tools,
                rollout=make_rollout(loop=loop, **{"max_turns": 3, **rollout}),
                sessions=sessions,
            )
            episode = await EpisodeRunner(parts, LastTurnScorer()).run(task or make_task(), ticket or make_ticket())
            return episode, generator.requests

    return asyncio.run(asyncio.wait_for(run(), timeout=60))


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_an_episode_through_the_gateway_is_the_native_episode(script):
    native, native_requests = play(script, "multi_turn_agent")
    through, requests = play(script, COMPLETION)
    assert through.result.outcome is native.result.outcome
    assert through.result.error is None
    (ours,), (theirs,) = through.result.trajectories, native.result.trajectories
    assert (ours.uid, ours.ids(), ours.loss_mask()) == (theirs.uid, theirs.ids(), theirs.loss_mask())
    assert (ours.logprobs(), ours.versions(), ours.temperature) == (theirs.logprobs(), theirs.versions(), theirs.temperature)
    assert [step.finish_reason for step in ours.steps] == [step.finish_reason for step in theirs.steps]
    assert through.result.messages == native.result.messages
    assert through.result.turn_texts == native.result.turn_texts
    assert through.result.counts == {**native.result.counts, "tokens/drift": 0, "branches": 0}
    assert [request.token_ids for request in requests] == [request.token_ids for request in native_requests]
    assert [request.sampling for request in requests] == [request.sampling for request in native_requests]


@pytest.mark.parametrize(
    ("limits", "outcome"),
    [
        ({"max_turns": 1}, Outcome.MAX_TURNS),
        ({"response_length": 60}, Outcome.MAX_TOKENS),
        ({"turns": {"max_tokens_per_turn": 5}}, Outcome.MAX_TOKENS),
        ({"prompt_length": 5}, Outcome.INFRA_ERROR),
    ],
)
def test_limits_are_the_native_loop_s(limits, outcome):
    script = [call_text("seven"), FINAL]
    through, requests = play(script, COMPLETION, **limits)
    native, native_requests = play(script, "multi_turn_agent", **limits)
    assert through.result.outcome is native.result.outcome is outcome
    assert [request.sampling.max_tokens for request in requests] == [request.sampling.max_tokens for request in native_requests]
    assert [trajectory.ids() for trajectory in through.result.trajectories] == [t.ids() for t in native.result.trajectories]


def test_a_ticket_s_temperature_reaches_engine_and_record():
    episode, requests = play([FINAL], COMPLETION, temperature=0.7, top_p=0.9, top_k=5, ticket=make_ticket(temperature=0.25, seed=11))
    sampling = requests[0].sampling
    # By hand: 11 * 1000003.
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.25, 0.9, 5, 11_000_033)
    assert episode.result.trajectories[0].temperature == 0.25


def test_an_engine_that_fails_is_infra_and_never_judged():
    def script(request):
        if request.request_id.endswith("-1"):
            raise EngineError("replica 0 does not answer")
        return Reply(call_text("seven"))

    episode, _ = play(script, COMPLETION)
    assert (episode.result.outcome, episode.score.reward) == (Outcome.INFRA_ERROR, None)
    assert "replica 0 does not answer" in episode.result.error
    assert episode.result.trajectories[0].num_turns == 1


def test_a_run_without_a_gateway_is_refused_at_the_start():
    parts = LoopParts(renderer=renderer(), generator=ScriptedGenerator([]), rollout=make_rollout(loop=COMPLETION))
    with pytest.raises(ConfigError, match="this run has none"):
        EpisodeRunner(parts, LastTurnScorer())


def test_a_cancelled_episode_leaves_no_session_and_its_turn_never_ends_at_the_engine():
    class Hanging(ScriptedGenerator):
        cancelled = False

        async def generate(self, request):
            self.requests.append(request)
            self.begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled = True
                raise

    async def run():
        generator = Hanging([])
        generator.begun = asyncio.Event()
        async with running_gateway(renderer(), generator, max_sessions=1) as sessions:
            parts = LoopParts(renderer=renderer(), generator=generator, rollout=make_rollout(loop=COMPLETION), sessions=sessions)
            work = asyncio.ensure_future(EpisodeRunner(parts, LastTurnScorer()).run(make_task(), make_ticket()))
            await generator.begun.wait()
            work.cancel()
            with pytest.raises(asyncio.CancelledError):
                await work
            assert generator.cancelled
            # The only place is free again.
            from psrl.agent_loops.limits import Limits
            from psrl.agent_loops.session_spec import session_spec_of

            await sessions.open(session_spec_of(parts, make_ticket(), Limits.from_rollout(parts.rollout)))

    asyncio.run(asyncio.wait_for(run(), timeout=60))


def step(observation, sampled, **changes):
    fields = {"logprobs": [-0.5] * len(sampled), "policy_versions": [3] * len(sampled), "temperature": 1.0, "finish_reason": "stop"}
    return Step(**{"observation_ids": observation, "sampled_ids": sampled, **fields, **changes})


@pytest.mark.parametrize(
    ("ours", "theirs", "num"),
    [
        ([step([1, 2], [3, 4])], [step([1, 2], [3, 4])], 0),
        ([step([1, 2], [3, 4])], [step([1, 2], [3, 5, 6])], 2),
        ([step([1, 2], [3, 4])], [step([1], [2, 3, 4])], 1),  # 2 has another mask
        ([step([1], [2, 3])], [step([1], [2, 3], logprobs=[-0.5, -0.25])], 1),
        ([step([1], [2, 3])], [step([1], [2, 3], policy_versions=[3, 4])], 1),
        ([step([1], [2])], [step([1], [2]), step([3, 4], [5])], 3),
        ([step([1], [2]), step([3], [4])], [step([1], [2, 3]), step([], [4])], 1),
        ([], [step([1], [2])], 2),
    ],
)
def test_drift_counts_every_place_at_which_two_records_differ(ours, theirs, num):
    assert num_differing_tokens(ours, theirs) == num
    assert num_differing_tokens(theirs, ours) == num


def trajectory_of(*steps):
    trajectory = Trajectory(uid=TrajectoryUid("train-0-0-e0-t0"))
    for one in steps:
        trajectory.append(one)
    return trajectory


def record_of(*trajectories):
    num_turns = sum(trajectory.num_turns for trajectory in trajectories)
    uid = make_ticket().uid
    return SessionRecord(id=SessionId("abc"), uid=uid, trajectories=trajectories, messages=(), turn_texts=(), num_turns=num_turns)


def result_of(outcome, *steps):
    return LoopResult(outcome=outcome, trajectories=(trajectory_of(*steps),), messages=(), turn_texts=("t",))


def test_a_record_that_differs_is_no_sample_and_says_how_much():
    result = as_captured(result_of(Outcome.FINISHED, step([1, 2], [3, 4])), record_of(trajectory_of(step([1, 2], [3, 5]))))
    assert result.outcome is Outcome.INFRA_ERROR
    assert result.counts["tokens/drift"] == 1
    assert result.error == "session abc of train-0-0-e0: 1 tokens of its record differ from what the agent data built"


def test_a_second_branch_is_drift():
    one, other = trajectory_of(step([1], [2])), trajectory_of(step([1], [3]))
    result = as_captured(result_of(Outcome.FINISHED, step([1], [2])), record_of(one, other))
    assert (result.outcome, result.counts["tokens/drift"]) == (Outcome.INFRA_ERROR, 2)


def test_a_turn_that_the_end_of_the_time_overtook_is_no_drift():
    captured = record_of(trajectory_of(step([1], [2]), step([3], [4])))
    timed_out = as_captured(result_of(Outcome.TIMEOUT, step([1], [2])), captured)
    finished = as_captured(result_of(Outcome.FINISHED, step([1], [2])), captured)
    assert (timed_out.outcome, timed_out.counts["tokens/drift"]) == (Outcome.TIMEOUT, 0)
    assert (finished.outcome, finished.counts["tokens/drift"]) == (Outcome.INFRA_ERROR, 2)


def test_an_episode_that_never_asked_for_a_turn_has_no_session_and_keeps_its_error():
    result = replace(result_of(Outcome.INFRA_ERROR), error="EnvironmentFault: no reset")
    assert as_captured(result, None) == result


def test_the_conversation_that_is_sent_holds_tool_answers_by_the_ids_of_their_calls():
    episode, _ = play([f"{call_text('a')}\n{call_text('b')}", FINAL], COMPLETION)
    messages = episode.result.messages
    assert [message.role for message in messages] == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.TOOL, Role.ASSISTANT]
    assert [message.tool_call_id for message in messages[2:4]] == [call.id for call in messages[1].tool_calls]
    assert episode.result.trajectories[0].steps[0].sampled_ids == ids_of(f"{call_text('a')}\n{call_text('b')}")
