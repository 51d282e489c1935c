"""Each scorer gives the rewards that its rule says, and None where nothing can be said of the policy."""

import asyncio
from pathlib import Path

import pytest
from episodes import result, scorer_of, task

from psrl.config.reward import OverlongBufferConfig, RewardConfig
from psrl.errors import ConfigError, RewardError
from psrl.rewards.retool import REWARD_TABLE, WRONG, reward_of, reward_table_markdown
from psrl.types import Outcome

DOCS = Path(__file__).parent.parent.parent / "docs" / "recipes"


def score(name, the_task, the_result, **settings):
    async def run():
        scorer = scorer_of(RewardConfig(name=name, **settings))
        try:
            return await scorer.score(the_task, the_result)
        finally:
            await scorer.close()

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("turns", "tool_turns", "reward", "accuracy"),
    [
        (["call", r"\boxed{42}"], 1, 1.0, 1.0),
        ([r"\boxed{42}"], 0, 1.0, 1.0),
        ([r"\boxed{41}"], 0, -1.0, 0.0),
        (["call", r"\boxed{41}"], 1, -0.9, 0.0),
        (["call", "call", r"\boxed{41}"], 2, -0.8, 0.0),
        (["call"] * 9 + [r"\boxed{41}"], 9, -0.6, 0.0),
        (["call", "I give up"], 1, -1.0, 0.0),
        (["no idea"], 0, -1.0, 0.0),
        ([r"\boxed{42}", "I mean nothing"], 0, -1.0, 0.0),
        ([], 0, -1.0, 0.0),
    ],
)
def test_retool_rewards_are_those_of_the_table(turns, tool_turns, reward, accuracy):
    scored = score("retool", task(), result(*turns, tool_turns=tool_turns))
    assert scored.reward == pytest.approx(reward)
    assert scored.accuracy == accuracy


def test_an_honest_try_is_never_worth_less_than_giving_up():
    rewards = [reward_of(WRONG, num_tool_turns=turns) for turns in range(100)]
    assert min(rewards) == reward_of(REWARD_TABLE[2], num_tool_turns=5) == -1.0
    assert max(rewards) == -0.6


@pytest.mark.parametrize("page", ["retool_tiny/training.md", "retool/training.md"])
def test_the_docs_print_the_reward_table_of_the_code(page):
    assert reward_table_markdown() in (DOCS / page).read_text()


@pytest.mark.parametrize("outcome", [Outcome.MAX_TOKENS, Outcome.MAX_TURNS, Outcome.TIMEOUT])
def test_an_episode_cut_at_a_limit_is_judged_by_its_last_turn(outcome):
    assert score("retool", task(), result("so the answer is", outcome=outcome)).reward == -1.0
    assert score("math_answer", task(), result(r"\boxed{42} and", outcome=outcome)).reward == 1.0


@pytest.mark.parametrize("name", ["retool", "math_answer", "environment"])
@pytest.mark.parametrize("outcome", [Outcome.INFRA_ERROR, Outcome.ABORTED])
def test_what_says_nothing_about_the_policy_has_no_reward(name, outcome):
    scored = score(name, task(), result(r"\boxed{42}", outcome=outcome))
    assert (scored.reward, scored.accuracy) == (None, None)


def test_a_task_without_truth_is_a_failed_grading_and_no_reward():
    with pytest.raises(RewardError, match="no ground truth"):
        score("retool", task(truth=None), result(r"\boxed{42}"))


def test_the_environments_rewards_are_summed():
    scored = score("environment", task(), result("a", "b", "c", step_rewards=(0.25, None, 0.5)))
    assert (scored.reward, scored.accuracy) == (0.75, 1.0)
    assert score("environment", task(), result("a", step_rewards=(-1.0,))).accuracy == 0.0


def test_an_environment_may_say_itself_whether_a_task_was_solved():
    scored = score("environment", task(), result("a", step_rewards=(0.5,), counts={"env/accuracy": 0.0}))
    assert (scored.reward, scored.accuracy) == (0.5, 0.0)


def test_a_finished_episode_that_its_environment_never_judged_is_an_error():
    with pytest.raises(RewardError, match=r"set reward\.name"):
        score("environment", task(), result("a", "b", step_rewards=(None, None)))
    assert score("environment", task(), result("a", outcome=Outcome.MAX_TOKENS)).reward == 0.0


@pytest.mark.parametrize(("num_sampled", "penalty"), [(1, 0.0), (80, 0.0), (90, 0.5), (100, 1.0), (150, 1.0)])
def test_the_overlong_penalty_grows_over_the_buffer_and_counts_sampled_tokens_only(num_sampled, penalty):
    buffer = OverlongBufferConfig(enable=True, len=20, penalty_factor=1.0, max_sampled_tokens=100)
    scored = score("retool", task(), result(r"\boxed{42}", num_sampled=num_sampled, num_observed=500), overlong_buffer=buffer)
    assert scored.reward == pytest.approx(1.0 - penalty)
    assert scored.accuracy == 1.0


def test_a_buffer_longer_than_the_limit_is_refused():
    with pytest.raises(ConfigError, match="max_sampled_tokens"):
        score("retool", task(), result(), overlong_buffer=OverlongBufferConfig(enable=True, len=600, max_sampled_tokens=512))


def test_an_unknown_scorer_is_refused_with_the_known_names():
    with pytest.raises(ConfigError, match="custom, environment, execution, math_answer, retool"):
        scorer_of(RewardConfig(name="retol"))
