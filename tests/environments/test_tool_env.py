"""`tool_env`: one answer per call, in order, whatever the policy wrote."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.config.rollout import MultiTurnConfig
from psrl.environments import EnvironmentParts, build_environment
from psrl.environments.tool_env import ToolEnvironment, head_and_tail
from psrl.errors import ConfigError, EnvironmentFault, SandboxError, ToolError
from psrl.protocols import ToolResult
from psrl.types import Message, ParsedTurn, Role, Task, TaskUid, ToolCall, ToolCallError, ToolSchema

TASK = Task(uid=TaskUid("t"), prompt=(Message(role=Role.USER, content="hi"),), data_source="test")


class Adder:
    """Adds a and b."""

    def __init__(self, name="add"):
        self.schema = ToolSchema(name=name, description="Adds.", parameters={"type": "object"})

    async def call(self, arguments):
        if set(arguments) != {"a", "b"}:
            raise ToolError(f"needs a and b, got {sorted(arguments)}")
        if arguments["b"] == "boom":
            raise SandboxError("no sandbox could be started")
        if not all(isinstance(value, int) for value in arguments.values()):
            return ToolResult(text="Error: a and b must be integers", error_cause="bad_arguments")
        return ToolResult(text=str(arguments["a"] + arguments["b"]), run_s=0.5)

    async def close(self):
        raise AssertionError("an environment never closes a shared tool")


def turn(*calls):
    return ParsedTurn(content="", reasoning=None, calls=calls, text="")


def call(position, name="add", **arguments):
    return ToolCall(id=f"call-0-{position}", name=name, arguments=arguments)


def step(action, *, max_calls=4, max_chars=512, tools=None):
    async def play():
        multi_turn = MultiTurnConfig(enable=True, max_calls_per_turn=max_calls, max_tool_response_length=max_chars)
        environment = build_environment("tool_env", EnvironmentParts(tools=tools or [Adder()], multi_turn=multi_turn))
        assert await environment.reset(TASK) == (TASK.prompt, {})
        try:
            return await environment.step(action)
        finally:
            await environment.close()
            await environment.close()

    return asyncio.run(play())


def test_every_call_gets_its_answer_in_order_with_its_id():
    broken = ToolCallError(id="call-0-1", cause="invalid_json", message="line 1: expected a comma", written="{")
    observation, reward, done, info = step(
        turn(call(0, a=2, b=3), broken, call(2, "sub", a=1), call(3, a=1), call(4, a=1, b=1), call(5)), max_calls=5
    )
    assert [message.tool_call_id for message in observation] == [f"call-0-{i}" for i in range(6)]
    assert {message.role for message in observation} == {Role.TOOL}
    assert [message.content for message in observation] == [
        "5",
        "Error: line 1: expected a comma",
        "Error: there is no tool named 'sub'. Tools: add.",
        "Error: needs a and b, got ['a']",
        "2",
        "Error: not run, a turn may make 5 calls at most.",
    ]
    assert (reward, done) == (None, False)
    errors = {"tool_errors/invalid_json": 1, "tool_errors/unknown_tool": 1, "tool_errors/tool_error": 1, "tool_errors/too_many_calls": 1}
    assert info == {"tool_calls": 6, "tool_turns": 1, "tool_queue_s": 0.0, "tool_run_s": 1.0, **errors}


def test_a_turn_of_which_no_call_reached_a_tool_is_no_tool_turn():
    _, _, done, info = step(turn(ToolCallError(id="x", cause="unclosed", message="Error", written="{"), call(1, "sub")))
    assert not done
    assert info == {"tool_calls": 2, "tool_errors/unclosed": 1, "tool_errors/unknown_tool": 1}


def test_a_turn_without_calls_is_the_last():
    assert step(turn()) == ((), None, True, {})


def test_a_sandbox_that_fails_is_raised_and_not_shown():
    with pytest.raises(SandboxError, match="no sandbox"):
        step(turn(call(0, a=1, b="boom")))


def test_an_action_of_another_agent_data_is_refused_with_the_one_that_fits():
    with pytest.raises(EnvironmentFault, match="tool_agent_data, got str"):
        step("a text")


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="different names"):
        ToolEnvironment(tools=[Adder(), Adder()], max_calls_per_turn=1, max_tool_response_length=10)


def test_a_long_answer_keeps_head_and_tail():
    class Long(Adder):
        async def call(self, arguments):
            return ToolResult(text="<" + "x" * 1000 + ">")

    (message,), *_ = step(turn(call(0)), max_chars=100, tools=[Long()])
    assert len(message.content) <= 100
    assert message.content.startswith("<xxx")
    assert message.content.endswith("xxx>")
    assert "characters left out" in message.content


@given(text=st.text(max_size=300), max_chars=st.integers(min_value=0, max_value=320))
def test_shortened_text_is_never_longer_than_allowed_and_says_how_much_is_missing(text, max_chars):
    short = head_and_tail(text, max_chars)
    assert len(short) <= max_chars
    if len(text) <= max_chars:
        assert short == text
    elif "left out]" in short and "left out]" not in text:
        head, mark, tail = short.partition("\n[")[0], short, short.rpartition("left out]\n")[2]
        missing = int(mark.partition("\n[")[2].split()[0])
        assert len(head) + len(tail) + missing == len(text)
        assert text.startswith(head)
        assert text.endswith(tail)
