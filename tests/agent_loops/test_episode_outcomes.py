"""Every way in which an episode can end, through the real driver, environments, agent data, renderer and parser."""

import asyncio
from collections import Counter
from typing import ClassVar

import pytest
from episode_kit import (
    LOGPROB,
    VERSION,
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
from psrl.chat import load_renderer
from psrl.config.sandbox import SandboxConfig
from psrl.environments import Environment, register_environment
from psrl.errors import AgentError, ConfigError, DataPlaneError, EngineError, EnvironmentFault, RewardError, SandboxError
from psrl.sandbox import build_interpreter
from psrl.tools.code_interpreter import CodeInterpreter
from psrl.types import FinishReason, Generation, Outcome, Role, Score, turn_seed
from tests.real_models import qwen3_tokenizer_path

FINAL = "The answer is \\boxed{7}."
CODE_CALL = '<tool_call>\n{"name": "code_interpreter", "arguments": {"code": "print(1)"}}\n</tool_call>'


@register_environment("test_chatty")
class Chatty(Environment[str, str]):
    """Says "more" until the turn is "stop"; can be told where to fail."""

    fails_in: ClassVar[dict[str, BaseException]] = {}
    hangs_in = ""
    num_closed = 0

    async def reset(self, task):
        await self._maybe("reset")
        return "begin", {"rooms": 2}

    async def step(self, action):
        await self._maybe("step")
        return "more", 0.25, action == "stop", {"rooms": 1, "note": "no number"}

    async def close(self):
        Chatty.num_closed += 1
        await self._maybe("close")

    async def _maybe(self, method):
        if method in self.fails_in:
            raise self.fails_in[method]
        if method == self.hangs_in:
            await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def _chatty_as_new():
    Chatty.fails_in, Chatty.hangs_in, Chatty.num_closed = {}, "", 0


def play(script, *, tools=(), scorer=None, task=None, ticket=None, **rollout):
    generator = ScriptedGenerator(script)
    parts = LoopParts(renderer=renderer(), generator=generator, tools=tools, rollout=make_rollout(**rollout))
    runner = EpisodeRunner(parts, scorer or LastTurnScorer())
    episode = asyncio.run(asyncio.wait_for(runner.run(task or make_task(), ticket or make_ticket()), timeout=30))
    assert runner.num_by_outcome == Counter({episode.result.outcome: 1})
    return episode, generator


def play_chatty(script, **more):
    return play(script, env="test_chatty", data="conversation", **more)


def test_a_call_is_run_and_a_turn_without_calls_finishes():
    tool = EchoTool()
    episode, generator = play([call_text("seven"), FINAL], tools=[tool])
    result = episode.result
    assert (result.outcome, result.error) == (Outcome.FINISHED, None)
    assert tool.ran == ["seven"]
    assert (episode.score.reward, episode.score.accuracy) == (1.0, 1.0)
    assert [message.role for message in result.messages] == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
    assert result.messages[2].content == "seven"
    assert result.messages[2].tool_call_id == result.messages[1].tool_calls[0].id
    expected = {"tool_calls": 1, "tool_turns": 1, "turns": 2, "env/tool_calls": 1, "env/tool_turns": 1}
    assert result.counts == {**expected, "env/tool_queue_s": 0.25, "env/tool_run_s": 0.5}
    assert result.step_rewards == (None, None)
    assert [request.request_id for request in generator.requests] == ["train-0-0-e0-0", "train-0-0-e0-1"]
    assert {request.session for request in generator.requests} == {"train-0-0-e0"}


def test_the_trajectory_holds_exactly_what_was_sent_and_sampled():
    episode, generator = play([call_text("seven"), FINAL], tools=[EchoTool()])
    (trajectory,) = episode.result.trajectories
    sampled = [ids_of(call_text("seven")), ids_of(FINAL)]
    assert trajectory.uid == "train-0-0-e0-t0"
    assert [step.sampled_ids for step in trajectory.steps] == sampled
    assert trajectory.ids() == generator.requests[1].token_ids + sampled[1]
    assert trajectory.ids()[: len(generator.requests[0].token_ids)] == generator.requests[0].token_ids
    assert sum(trajectory.loss_mask()) == len(sampled[0]) + len(sampled[1])
    assert {trajectory.num_tokens} == {
        len(row) for row in (trajectory.ids(), trajectory.loss_mask(), trajectory.logprobs(), trajectory.versions())
    }
    masked = zip(trajectory.loss_mask(), trajectory.logprobs(), trajectory.versions(), strict=True)
    assert set(masked) == {(1, LOGPROB, VERSION), (0, 0.0, -1)}


def test_a_truncated_turn_executes_nothing_even_where_its_call_is_whole():
    tool = EchoTool()
    episode, _ = play([Reply(call_text("never"), FinishReason.LENGTH)], tools=[tool])
    assert episode.result.outcome is Outcome.MAX_TOKENS
    assert tool.ran == []
    assert episode.result.counts["tool_calls"] == 0
    assert episode.result.trajectories[0].num_sampled == len(ids_of(call_text("never"))) - 1
    assert episode.score.reward == 0.0


def test_a_turn_that_the_engine_gives_back_unfinished_goes_on_with_what_it_has():
    def script(request):
        return Reply("The answer ", FinishReason.ABORT) if not request.request_id.endswith("-r1") else Reply("is \\boxed{7}")

    episode, generator = play(script)
    assert episode.result.outcome is Outcome.FINISHED
    (trajectory,) = episode.result.trajectories
    assert trajectory.steps[0].sampled_ids == ids_of("The answer ")[:-1] + ids_of("is \\boxed{7}")
    assert generator.requests[1].token_ids == generator.requests[0].token_ids + ids_of("The answer ")[:-1]
    assert episode.result.counts["resumed_turns"] == 1


def test_an_engine_that_only_gives_turns_back_is_an_infra_error():
    scorer = LastTurnScorer()
    episode, generator = play(lambda request: Reply("", FinishReason.ABORT), scorer=scorer)
    assert episode.result.outcome is Outcome.INFRA_ERROR
    assert "gave the turn back unfinished 65 times" in episode.result.error
    assert len(generator.requests) == 65
    assert episode.score == Score(reward=None)
    assert scorer.scored == []


@pytest.mark.parametrize("max_turns", [1, 2, 3])
def test_max_turns_is_the_number_of_turns_played(max_turns):
    episode, generator = play_chatty(["on", "on", "on", "on"], max_turns=max_turns)
    assert episode.result.outcome is Outcome.MAX_TURNS
    assert len(generator.requests) == max_turns
    assert episode.result.trajectories[0].num_turns == max_turns
    assert episode.result.step_rewards == (0.25,) * max_turns
    assert episode.result.counts == {"turns": max_turns, "env/rooms": 2 + max_turns}


def test_a_last_turn_that_is_done_finishes_rather_than_reaching_max_turns():
    episode, _ = play_chatty(["on", "stop"], max_turns=2)
    assert episode.result.outcome is Outcome.FINISHED


def test_the_budget_of_a_turn_is_what_the_trajectory_has_left():
    first, between = len(ids_of("on")), len(renderer().extend(ids_of("on"), [make_task().prompt[0]])) - len(ids_of("on"))
    assert between > 0
    episode, generator = play_chatty(["on", "stop"], response_length=200)
    used = len(generator.requests[1].token_ids) - len(generator.requests[0].token_ids)
    assert [request.sampling.max_tokens for request in generator.requests] == [200, 200 - used]
    assert used > first
    assert episode.result.outcome is Outcome.FINISHED


@pytest.mark.parametrize(
    ("spare", "outcome", "num_turns"), [(-1, Outcome.MAX_TOKENS, 1), (0, Outcome.MAX_TOKENS, 1), (1, Outcome.MAX_TOKENS, 2)]
)
def test_a_trajectory_that_is_full_before_a_turn_ends_without_generating(spare, outcome, num_turns):
    _, probe = play_chatty(["on", "stop"])
    used = len(probe.requests[1].token_ids) - len(probe.requests[0].token_ids)
    episode, generator = play_chatty(["on", "stop"], response_length=used + spare)
    assert episode.result.outcome is outcome
    assert len(generator.requests) == num_turns
    assert episode.result.trajectories[0].num_tokens <= len(generator.requests[0].token_ids) + used + spare


def test_a_turn_that_just_fits_is_whole_and_one_token_less_cuts_it():
    fits, _ = play_chatty(["stop"], response_length=len(ids_of("stop")))
    cut, _ = play_chatty(["stop"], response_length=len(ids_of("stop")) - 1)
    assert (fits.result.outcome, cut.result.outcome) == (Outcome.FINISHED, Outcome.MAX_TOKENS)


def test_max_tokens_per_turn_bounds_each_turn():
    episode, generator = play_chatty(["on", "a text that is too long"], turns={"max_tokens_per_turn": 5})
    assert [request.sampling.max_tokens for request in generator.requests] == [5, 5]
    assert episode.result.outcome is Outcome.MAX_TOKENS


def test_a_first_prompt_that_is_too_long_is_nobody_s_reward():
    exact = len(renderer().open(make_task().prompt, []))
    fits, _ = play([FINAL], prompt_length=exact)
    too_long, generator = play([FINAL], prompt_length=exact - 1)
    assert fits.result.outcome is Outcome.FINISHED
    assert too_long.result.outcome is Outcome.INFRA_ERROR
    assert f"{exact} tokens, rollout.prompt_length allows {exact - 1}" in too_long.result.error
    assert generator.requests == []
    assert too_long.result.trajectories == ()


FAILURES = [
    (EngineError("gone"), Outcome.INFRA_ERROR),
    (SandboxError("gone"), Outcome.INFRA_ERROR),
    (DataPlaneError("gone"), Outcome.INFRA_ERROR),
    (EnvironmentFault("gone"), Outcome.INFRA_ERROR),
    (ValueError("gone"), Outcome.INFRA_ERROR),
    (TimeoutError("gone"), Outcome.INFRA_ERROR),
    (asyncio.CancelledError("gone"), Outcome.INFRA_ERROR),
    (AgentError("gone"), Outcome.AGENT_ERROR),
]


@pytest.mark.parametrize(
    ("error", "outcome"), FAILURES, ids=lambda value: str(value) if isinstance(value, Outcome) else type(value).__name__
)
def test_what_a_step_raises_decides_the_outcome_and_the_environment_is_closed(error, outcome):
    Chatty.fails_in = {"step": error}
    episode, _ = play_chatty(["on"])
    assert episode.result.outcome is outcome
    assert Chatty.num_closed == 1
    assert (episode.score.reward is None) == (outcome is Outcome.INFRA_ERROR)
    name = "EnvironmentFault" if isinstance(error, asyncio.CancelledError) else type(error).__name__
    assert episode.result.error.startswith(f"{name}: ")
    assert episode.result.counts[f"errors/{name}"] == 1
    assert episode.result.trajectories[0].num_turns == 1


def test_a_reset_that_raises_is_closed_and_never_judged():
    Chatty.fails_in = {"reset": AgentError("before the policy did anything")}
    episode, generator = play_chatty([])
    assert episode.result.outcome is Outcome.INFRA_ERROR
    assert "AgentError: before the policy did anything" in episode.result.error
    assert (Chatty.num_closed, generator.requests, episode.result.trajectories) == (1, [], ())


def test_a_close_that_raises_is_told_and_changes_nothing_else():
    Chatty.fails_in = {"close": OSError("the door is stuck")}
    episode, _ = play_chatty(["stop"])
    assert episode.result.outcome is Outcome.FINISHED
    assert episode.result.error == "OSError: the door is stuck"
    assert episode.result.counts["errors/OSError"] == 1
    assert episode.score.reward == 0.0


def test_a_step_that_hangs_is_a_timeout_which_the_policy_answers_for():
    Chatty.hangs_in = "step"
    episode, _ = play_chatty(["on"], agent={"step_timeout_s": 0.05})
    assert episode.result.outcome is Outcome.TIMEOUT
    assert "Chatty: Environment.step took longer than 0.05 s" in episode.result.error
    assert episode.result.trajectories[0].num_turns == 1
    assert (episode.score.reward, Chatty.num_closed) == (0.0, 1)


def play_beside_a_program_that_keeps_the_only_sandbox(agent):
    """An episode whose one call finds the sandbox taken until its time is over."""

    async def play():
        interpreter = build_interpreter(SandboxConfig(num_workers=1, wall_s=20))
        parts = LoopParts(
            renderer=renderer(),
            generator=ScriptedGenerator([CODE_CALL, FINAL]),
            rollout=make_rollout(agent=agent),
            tools=(CodeInterpreter(interpreter),),
        )
        await interpreter.start()
        keeping = asyncio.create_task(interpreter.run_program("while True: pass"))
        try:
            await asyncio.sleep(0)  # the program takes the sandbox
            return await asyncio.wait_for(EpisodeRunner(parts, LastTurnScorer()).run(make_task(), make_ticket()), timeout=30)
        finally:
            keeping.cancel()
            await interpreter.stop()
            await asyncio.gather(keeping, return_exceptions=True)

    return asyncio.run(play())


@pytest.mark.parametrize("agent", [{"step_timeout_s": 0.4}, {"episode_timeout_s": 0.4, "step_timeout_s": 20.0}])
def test_a_step_that_waits_for_a_sandbox_until_its_time_is_over_is_infra_and_never_judged(agent):
    episode = play_beside_a_program_that_keeps_the_only_sandbox(agent)
    assert (episode.result.outcome, episode.score.reward) == (Outcome.INFRA_ERROR, None)
    assert episode.result.error.startswith("SandboxError: ") and "a free sandbox" in episode.result.error


@pytest.mark.parametrize("method", ["reset", "close"])
def test_a_reset_or_close_that_hangs_is_no_timeout_of_the_policy(method):
    Chatty.hangs_in = method
    episode, _ = play_chatty(["stop"], agent={"step_timeout_s": 0.05})
    assert episode.result.outcome is {"reset": Outcome.INFRA_ERROR, "close": Outcome.FINISHED}[method]
    assert f"Environment.{method} took longer than 0.05 s" in episode.result.error


def test_an_episode_that_runs_out_of_its_seconds_keeps_its_turns():
    Chatty.hangs_in = "step"
    episode, _ = play_chatty(["on"], agent={"episode_timeout_s": 0.05, "step_timeout_s": 20.0})
    assert episode.result.outcome is Outcome.TIMEOUT
    assert "episode train-0-0-e0 took longer than 0.05 s" in episode.result.error
    assert episode.result.trajectories[0].num_turns == 1
    assert Chatty.num_closed == 1


def test_an_engine_that_hangs_until_the_episode_s_deadline_is_infra_and_never_judged():
    class Hanging(ScriptedGenerator):
        async def generate(self, request):
            if request.request_id.endswith("-1"):
                await asyncio.Event().wait()
            return await super().generate(request)

    parts = LoopParts(
        renderer=renderer(),
        generator=Hanging(["on"]),
        rollout=make_rollout(env="test_chatty", data="conversation", agent={"episode_timeout_s": 0.2}),
    )
    scorer = LastTurnScorer()
    episode = asyncio.run(asyncio.wait_for(EpisodeRunner(parts, scorer).run(make_task(), make_ticket()), timeout=30))
    assert (episode.result.outcome, episode.score.reward, scorer.scored) == (Outcome.INFRA_ERROR, None, [])
    assert episode.result.error.startswith("EngineError: episode train-0-0-e0 took longer than 0.2 s")
    assert Chatty.num_closed == 1


def test_a_tool_episode_on_qwen3_is_the_template_s_own_conversation():
    real = load_renderer(str(qwen3_tokenizer_path()), tool_format="hermes")
    tool = EchoTool()
    turns = [call_text("seven"), FINAL]

    class Speaks(ScriptedGenerator):
        async def generate(self, request):
            ids = [*real.template.encode(turns[len(self.requests)]), real.stop_token_ids[0]]
            self.requests.append(request)
            return Generation(
                token_ids=ids,
                logprobs=[LOGPROB] * len(ids),
                policy_versions=[VERSION] * len(ids),
                finish_reason=FinishReason.STOP,
                prompt_tokens=len(request.token_ids),
                cached_tokens=0,
                latency_s=0.0,
            )

    parts = LoopParts(renderer=real, generator=Speaks([]), tools=[tool], rollout=make_rollout())
    episode = asyncio.run(asyncio.wait_for(EpisodeRunner(parts, LastTurnScorer()).run(make_task(), make_ticket()), timeout=60))
    assert (episode.result.outcome, tool.ran) == (Outcome.FINISHED, ["seven"])
    conversation = real.template.text(episode.result.messages[:-1], [tool.schema], header=True)
    assert real.decode(episode.result.trajectories[0].ids()) == conversation + FINAL + "<|im_end|>"


def test_an_engine_failure_is_infra_and_says_so():
    def script(request):
        raise EngineError("replica 0 does not answer")

    episode, _ = play_chatty(script)
    assert (episode.result.outcome, episode.result.error) == (Outcome.INFRA_ERROR, "EngineError: replica 0 does not answer")
    assert Chatty.num_closed == 1


@pytest.mark.parametrize(("error", "name"), [(RewardError("grader died"), "RewardError"), (KeyError("x"), "KeyError")])
def test_a_grader_that_fails_gives_no_reward_and_leaves_the_outcome(error, name):
    class Broken(LastTurnScorer):
        async def score(self, task, result):
            raise error

    episode, _ = play([FINAL], scorer=Broken())
    assert (episode.result.outcome, episode.score.reward) == (Outcome.FINISHED, None)
    assert episode.result.error.startswith(name)
    assert episode.result.counts[f"errors/{name}"] == 1


class WrongShape(Chatty):
    async def step(self, action):
        return "more", 1.0, True


class NotANumber(Chatty):
    async def step(self, action):
        return "more", float("nan"), True, {}


@pytest.mark.parametrize(
    ("env", "says"), [("WrongShape", "must return (observation, reward, done, info)"), ("NotANumber", "a finite number or None")]
)
def test_an_environment_that_breaks_the_contract_is_infra_with_the_rule(env, says):
    episode, _ = play(["on"], env=f"{__name__}.{env}", data="conversation")
    assert episode.result.outcome is Outcome.INFRA_ERROR
    assert says in episode.result.error


def test_seeds_differ_by_turn_and_episode_and_follow_the_formula():
    _, generator = play_chatty(["on", "on", "stop"], ticket=make_ticket(seed=5))
    # By hand: 5 * 1000003 = 5000015.
    assert [request.sampling.seed for request in generator.requests] == [5_000_015, 5_000_016, 5_000_017]
    assert turn_seed(2**31, 4) == 4
    assert len({turn_seed(episode, turn) for episode in range(500) for turn in range(20)}) == 500 * 20


def test_a_ticket_s_temperature_replaces_the_rollout_s():
    _, own = play_chatty(["stop"], temperature=0.7)
    episode, greedy = play_chatty(["stop"], temperature=0.7, ticket=make_ticket(temperature=0.0))
    assert own.requests[0].sampling.temperature == 0.7
    assert greedy.requests[0].sampling.temperature == 0.0
    assert episode.result.trajectories[0].temperature == 0.0


def test_generate_only_takes_one_turn_whatever_multi_turn_says():
    episode, generator = play([FINAL], loop="generate_only_agent", max_turns=8)
    assert episode.result.outcome is Outcome.FINISHED
    assert len(generator.requests) == 1
    assert generator.requests[0].token_ids == renderer().open(make_task().prompt, [])


@pytest.mark.parametrize("choice", [{"loop": "no_such_loop"}, {"env": "no_such_env"}, {"data": "no_such_data"}, {"env": "no.such.Env"}])
def test_a_misspelt_default_fails_before_any_episode(choice):
    with pytest.raises(ConfigError, match="Fix: use one of"):
        play([FINAL], **choice)


def test_a_misspelt_choice_of_one_row_is_that_row_s_infra_error():
    for field in ("agent_name", "env_class", "data_class"):
        episode, _ = play([FINAL], task=make_task(**{field: "no_such"}))
        assert episode.result.outcome is Outcome.INFRA_ERROR
        assert episode.result.error.startswith("ConfigError: ")
        assert episode.result.messages == make_task().prompt


def test_timings_split_what_was_waited_for():
    episode, _ = play_chatty(["on", "stop"])
    timings = episode.timings
    assert min(timings.generation_s, timings.tools_s, timings.reward_s) > 0
    assert timings.generation_s + timings.tools_s + timings.reward_s <= timings.total_s
