"""The token work of agent data, on Qwen3's real tokenizer and template: sampled ids are kept, the context only grows."""

from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.agent_data import AgentDataParts, build_agent_data
from psrl.chat import load_renderer
from psrl.errors import ConfigError, EnvironmentFault
from psrl.types import FinishReason, Generation, Message, Role, Task, TaskUid, ToolCall, ToolCallError, ToolSchema, TrajectoryUid
from tests.real_models import qwen3_tokenizer_path

TASK = Task(uid=TaskUid("t"), prompt=(Message(role=Role.USER, content="hi"),), data_source="test")
TOOL = ToolSchema(name="add", description="Adds.", parameters={"type": "object", "properties": {"a": {"type": "integer"}}})


@cache
def renderer():
    return load_renderer(str(qwen3_tokenizer_path()), tool_format="hermes")


def make(name="conversation", **more):
    return build_agent_data(name, AgentDataParts(renderer=renderer(), trajectory_uid=TrajectoryUid("e-t0"), **more))


def generation(ids, reason=FinishReason.STOP):
    count = len(ids)
    return Generation(
        token_ids=list(ids),
        logprobs=[-0.25] * count,
        policy_versions=[2] * count,
        finish_reason=reason,
        prompt_tokens=0,
        cached_tokens=0,
        latency_s=0.0,
    )


def said(text):
    return generation([*renderer().template.encode(text), renderer().stop_token_ids[0]])


def test_the_first_prompt_is_the_template_s_own_with_its_tools():
    data = make("tool_agent_data", tool_schemas=[TOOL])
    data.begin(TASK, TASK.prompt, {})
    tokenizer = renderer().template
    assert data.context_ids() == tokenizer.encode(tokenizer.text(TASK.prompt, [TOOL], header=True))
    assert '"name": "add"' in renderer().decode(data.context_ids())
    assert data.trajectory.num_tokens == 0


def test_two_turns_are_the_template_s_own_rendering():
    data = make()
    data.begin(TASK, "What is 3 + 4?", {})
    assert data.act(said("7"), temperature=0.7) == "7"
    data.observe("And 3 + 5?", {})
    assert data.act(said("8"), temperature=0.7) == "8"
    question, answer = Message(role=Role.USER, content="What is 3 + 4?"), Message(role=Role.ASSISTANT, content="7")
    prompt = renderer().template.text([question, answer, Message(role=Role.USER, content="And 3 + 5?")], header=True)
    assert renderer().decode(data.trajectory.ids()) == prompt + "8<|im_end|>"
    assert [message.role for message in data.messages] == [Role.USER, Role.ASSISTANT, Role.USER, Role.ASSISTANT]
    assert data.turn_texts == ("7<|im_end|>", "8<|im_end|>")
    assert data.trajectory.temperature == 0.7
    assert [step.action for step in data.trajectory.steps] == ["7", "8"]


def test_an_observation_after_which_no_turn_follows_is_not_in_the_trajectory():
    data = make()
    data.begin(TASK, "a", {})
    data.act(said("b"), temperature=1.0)
    before = data.trajectory.ids()
    data.observe("c", {})
    assert data.trajectory.ids() == before
    assert data.context_ids()[: len(before)] == before
    assert len(data.context_ids()) > len(before)


def test_ids_that_no_encoder_would_give_are_kept_as_sampled():
    encoded = renderer().template.encode("hello")
    letters = [token for letter in "hello" for token in renderer().template.encode(letter)]
    assert encoded != letters
    assert renderer().decode(encoded) == renderer().decode(letters)
    data = make()
    data.begin(TASK, "a", {})
    data.act(generation([*letters, renderer().stop_token_ids[0]]), temperature=1.0)
    data.observe("b", {})
    assert data.trajectory.steps[0].sampled_ids[:-1] == letters
    assert data.trajectory.ids() == data.context_ids()[: data.trajectory.num_tokens]


OBSERVATIONS = st.one_of(
    st.text(max_size=30),
    st.lists(st.builds(Message, role=st.sampled_from([Role.USER, Role.TOOL]), content=st.text(max_size=20)), min_size=1, max_size=3),
)
# Any ids of the vocabulary's ordinary part: what a policy may sample, broken UTF-8 included. The last may be the end of the turn.
TURNS = st.tuples(st.lists(st.integers(min_value=0, max_value=151_000), min_size=1, max_size=12), st.booleans())


@settings(max_examples=60, deadline=None)
@given(
    first=st.text(min_size=1, max_size=30),
    rounds=st.lists(st.tuples(TURNS, OBSERVATIONS), max_size=5),
    name=st.sampled_from(["conversation", "tool_agent_data"]),
)
def test_the_context_only_grows_and_equals_trajectory_and_pending_observation(first, rounds, name):
    data = make(name)
    data.begin(TASK, first, {})
    seen = [data.context_ids()]
    sampled = []
    for (ids, is_ended), observation in rounds:
        turn = [*ids, renderer().stop_token_ids[0]] if is_ended else ids
        data.act(generation(turn, FinishReason.STOP if is_ended else FinishReason.LENGTH), temperature=1.0)
        sampled += turn
        assert data.context_ids() == data.trajectory.ids()  # Nothing is pending right after a turn.
        seen.append(data.context_ids())
        data.observe(observation, {})
        seen.append(data.context_ids())
    trajectory = data.trajectory
    assert all(after[: len(before)] == before for before, after in pairwise(seen))
    assert data.context_ids()[: trajectory.num_tokens] == trajectory.ids()
    assert [token for token, mask in zip(trajectory.ids(), trajectory.loss_mask(), strict=True) if mask] == sampled
    rows = (trajectory.ids(), trajectory.loss_mask(), trajectory.logprobs(), trajectory.versions(), trajectory.turn_indices())
    assert {len(row) for row in rows} == {trajectory.num_tokens}
    assert trajectory.num_turns == len(data.turn_texts) == len(rounds)


def test_tool_agent_data_hands_over_calls_and_broken_calls_and_counts_what_the_environment_reports():
    data = make("tool_agent_data", tool_schemas=[TOOL])
    data.begin(TASK, TASK.prompt, {})
    action = data.act(
        said('x<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{oops\n</tool_call>'), temperature=1.0
    )
    assert [type(call) for call in action.calls] == [ToolCall, ToolCallError]
    assert data.counts() == {"tool_calls": 0, "tool_turns": 0}
    answers = [Message(role=Role.TOOL, content="1", tool_call_id=action.calls[0].id), Message(role=Role.TOOL, content="Error")]
    data.observe(answers, {"tool_calls": 2, "tool_turns": 1, "tool_errors/invalid_json": 1, "tool_run_s": 0.5})
    assert data.counts() == {"tool_calls": 2, "tool_turns": 1, "tool_errors/invalid_json": 1}
    assert data.messages[1].tool_calls == (action.calls[0],)


@pytest.mark.parametrize("observation", [7, [7], None, (), {"role": "user"}])
def test_a_first_observation_that_is_no_conversation_is_the_environment_s_fault(observation):
    with pytest.raises(EnvironmentFault):
        make().begin(TASK, observation, {})


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match="conversation, mini_swe_agent_data, tool_agent_data"):
        make("no_such")
