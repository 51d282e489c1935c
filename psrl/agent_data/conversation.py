"""`conversation`: observations are messages, actions are read from the text of a turn.

Invariant: `context_ids() == trajectory.ids() + the observation tokens that wait for a turn`, and both only grow at their end.
Sampled ids enter as they came; nothing is decoded and encoded again. Observation tokens after which no turn follows are not
part of the trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from psrl.agent_data.base import AgentData, AgentDataParts, Info, register_agent_data
from psrl.errors import EnvironmentFault
from psrl.types import Generation, Message, ParsedTurn, Role, Step, Task, ToolCall, ToolSchema, Trajectory

ActType_co = TypeVar("ActType_co", covariant=True)


class ConversationAgentData(AgentData[Sequence[Message] | str, ActType_co], Generic[ActType_co]):
    """Base of agent data for chat models: does all token work. A subclass says what an action is, in `read_action`.

    An observation is a sequence of messages, or a text that is taken as one user message.

    Example:
        class NumberAgentData(ConversationAgentData[int | None]):
            def read_action(self, parsed: ParsedTurn) -> int | None:
                return int(parsed.content) if parsed.content.strip().isdigit() else None
    """

    def __init__(self, parts: AgentDataParts) -> None:
        """One object serves one episode."""
        self._renderer = parts.renderer
        self._tool_schemas: Sequence[ToolSchema] = parts.tool_schemas
        self._trajectory = Trajectory(uid=parts.trajectory_uid)
        self._context: list[int] = []
        self._pending: list[int] = []
        self._messages: list[Message] = []
        self._turn_texts: list[str] = []

    def read_action(self, parsed: ParsedTurn) -> ActType_co:
        """What the environment is given for a turn. Must not raise for what the policy wrote: make it part of the action."""
        raise NotImplementedError(f"{type(self).__name__} has no read_action")

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        """What the first prompt offers: the run's tools, or those of a subclass."""
        return self._tool_schemas

    @property
    def trajectory(self) -> Trajectory:
        """The tokens so far."""
        return self._trajectory

    @property
    def messages(self) -> Sequence[Message]:
        """The conversation so far."""
        return tuple(self._messages)

    @property
    def turn_texts(self) -> Sequence[str]:
        """The decoded text of each turn, special tokens included."""
        return tuple(self._turn_texts)

    def begin(self, task: Task, observation: Sequence[Message] | str, info: Info) -> None:
        """Render the first prompt, with the schemas of the tools."""
        assert not self._context, "begin is called once"
        messages = _as_messages(observation)
        if not messages:
            raise EnvironmentFault("the first observation has no message")
        self._grow(self._renderer.open(messages, self._tool_schemas), messages)

    def context_ids(self) -> list[int]:
        """[P] everything that the model reads before its next turn."""
        return list(self._context)

    def stop_token_ids(self) -> tuple[int, ...]:
        """Ids that end a turn of this model family."""
        return self._renderer.stop_token_ids

    def act(self, generation: Generation, *, temperature: float) -> ActType_co:
        """Append the turn as it was sampled and read its action."""
        parsed = self._renderer.parse(generation.token_ids, turn=self._trajectory.num_turns, tools=self._tool_schemas)
        action = self.read_action(parsed)
        self._trajectory.append(
            Step(
                observation_ids=self._pending,
                sampled_ids=list(generation.token_ids),
                logprobs=list(generation.logprobs),
                policy_versions=list(generation.policy_versions),
                temperature=temperature,
                finish_reason=generation.finish_reason.value,
                action=action,
            )
        )
        self._pending = []
        self._context += generation.token_ids
        calls = tuple(call for call in parsed.calls if isinstance(call, ToolCall))
        self._messages.append(Message(role=Role.ASSISTANT, content=parsed.content, reasoning=parsed.reasoning, tool_calls=calls))
        self._turn_texts.append(parsed.text)
        return action

    def observe(self, observation: Sequence[Message] | str, info: Info) -> None:
        """Render the environment's answer after the turn."""
        messages = _as_messages(observation)
        self._grow(self._renderer.following(self._context[-1] if self._context else None, messages), messages)

    def counts(self) -> dict[str, float]:
        """None of its own."""
        return {}

    def _grow(self, new_ids: list[int], messages: Sequence[Message]) -> None:
        self._pending = self._pending + new_ids
        self._context += new_ids
        self._messages += messages


@register_agent_data("conversation")
class TextAgentData(ConversationAgentData[str]):
    """The action is the turn's content: its text without reasoning, calls and special tokens."""

    def read_action(self, parsed: ParsedTurn) -> str:
        """The content as it is."""
        return parsed.content


def _as_messages(observation: Sequence[Message] | str) -> Sequence[Message]:
    if isinstance(observation, str):
        return (Message(role=Role.USER, content=observation),)
    messages = [message for message in observation if isinstance(message, Message)] if isinstance(observation, Sequence) else []
    if not isinstance(observation, Sequence) or len(messages) < len(observation):
        raise EnvironmentFault(f"an observation is a text or a sequence of messages, got {type(observation).__name__}: {observation!r:.80}")
    return messages
