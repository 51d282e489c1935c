"""One conversation of ten turns with a tool, twice: for the official `openai` client, and as an environment of the native loop."""

import json

from psrl.environments.base import Environment
from psrl.tools.code_interpreter import SCHEMA
from psrl.types import Message, Role, ToolCall

NUM_TURNS = 10
QUESTIONS = ("Compute 148 - 179.", "Evaluate 393 * 333.", "Compute 90 - 8.", "Evaluate 744 + 816.")
SYSTEM = Message(role=Role.SYSTEM, content="Answer in \\boxed{}.")
EXAMPLES = (("2 + 3", "5"), ("20 - 4", "16"), ("5 * 5", "25"))


def plain_prompt():
    """As the shipped tiny model knows it."""
    return (SYSTEM, Message(role=Role.USER, content=question(0)))


def prompt_with_examples():
    """With calls that the policy did not make, and their answers."""
    messages = [SYSTEM]
    for number, (sum_, result) in enumerate(EXAMPLES):
        call = ToolCall(id=f"example-{number}", name=SCHEMA.name, arguments={"code": f"print({sum_})"})
        messages += [
            Message(role=Role.USER, content=f"Compute {sum_}."),
            Message(role=Role.ASSISTANT, tool_calls=(call,)),
            Message(role=Role.TOOL, content=result, tool_call_id=call.id, name=call.name),
        ]
    return (*messages, Message(role=Role.USER, content=question(0)))


def question(turn):
    return QUESTIONS[turn % len(QUESTIONS)]


def result_of(turn, position):
    return f"{turn + position}"


class TenTurns(Environment):
    """Answers every call, and asks the next question where there is none."""

    def __init__(self):
        self._turn = 0

    async def reset(self, task):
        return task.prompt, {}

    async def step(self, action):
        self._turn += 1
        calls = [call for call in action.calls if isinstance(call, ToolCall)]
        answers = [
            Message(role=Role.TOOL, content=result_of(self._turn, position), tool_call_id=call.id, name=call.name)
            for position, call in enumerate(calls)
        ]
        return answers or [Message(role=Role.USER, content=question(self._turn))], None, False, {}

    async def close(self):
        pass


class InterpreterSchema:
    """A tool that is only shown: `TenTurns` answers in its place."""

    schema = SCHEMA

    async def call(self, arguments):
        raise AssertionError("TenTurns answers calls itself")

    async def close(self):
        pass


def converse(client, prompt, *, stream):
    """The same through `openai.OpenAI`; the assistant's messages go back as the client's own objects give them."""
    messages = [_openai(message) for message in prompt]
    for turn in range(1, NUM_TURNS + 1):
        body = {"model": "policy", "messages": messages, "tools": [SCHEMA.to_template()]}
        echo = _streamed(client, body) if stream else client.chat.completions.create(**body).choices[0].message.model_dump()
        messages.append(echo)
        calls = echo.get("tool_calls") or []
        for position, call in enumerate(calls):
            json.loads(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result_of(turn, position)})
        if not calls:
            messages.append({"role": "user", "content": question(turn)})


def _openai(message):
    raw = message.to_template()
    for call in raw.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return raw


def _streamed(client, body):
    with client.chat.completions.stream(**body) as events:
        for _ in events:
            pass
        return events.get_final_completion().choices[0].message.model_dump(exclude={"parsed"})
