"""`multi_turn_completion_agent`: the episodes of `multi_turn_agent`, with each turn a chat completion in a session of the gateway.

Environment, agent data, limits and outcomes are the native loop's. What is trained on is the session's record; it must say token for
token what the agent data built, else the episode is `infra_error` and names how many differ (`tokens/drift`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any, ClassVar, Protocol, runtime_checkable

from psrl.agent_loops.base import Failure, LoopParts, failure_or, register_agent_loop
from psrl.agent_loops.multi_turn import MultiTurnAgentLoop
from psrl.agent_loops.playing import TurnSource
from psrl.agent_loops.session_spec import session_spec_of, sessions_of
from psrl.protocols import AgentData
from psrl.session_client.bodies import generation_of
from psrl.session_client.client import SessionClient
from psrl.types import (
    EpisodeTicket,
    Generation,
    LoopResult,
    Message,
    Outcome,
    SessionAddress,
    SessionRecord,
    SessionSpec,
    Step,
    Task,
    ToolSchema,
)

SESSION_COUNTS = ("branches", "resumed_turns", "sampling_overrides/")
"""What the session counts beside what environment and agent data do."""


@runtime_checkable
class OffersTools(Protocol):
    """An agent data whose first prompt offers tools."""

    @property
    def tool_schemas(self) -> Sequence[ToolSchema]:
        """In the order in which the prompt shows them."""


class SessionTurns(TurnSource):
    """Turns of one episode as chat completions. The session is opened before the first and lasts until `close`."""

    def __init__(self, sessions: SessionClient, spec: SessionSpec, tools: Sequence[ToolSchema], *, timeout_s: float) -> None:
        """`tools` are offered where the agent data does not say which; `timeout_s` is the end of waiting for one turn."""
        self._sessions, self._spec, self._timeout_s = sessions, spec, timeout_s
        self._tools = tools
        self._address: SessionAddress | None = None
        self._conversation: list[dict[str, Any]] = []

    async def sample(self, data: AgentData[Any, Any], *, max_tokens: int) -> Generation:
        """The answer to what `data` has said since the last turn; earlier answers go back as they came."""
        if self._address is None:
            self._address = await self._sessions.open(self._spec)
        self._conversation += [_openai_message(message) for message in data.messages[len(self._conversation) :]]
        body: dict[str, Any] = {"model": "psrl", "messages": self._conversation, "max_tokens": max_tokens, "return_token_ids": True}
        tools = data.tool_schemas if isinstance(data, OffersTools) else self._tools
        if tools:
            body["tools"] = [tool.to_template() for tool in tools]
        began = time.monotonic()
        answer = await self._sessions.chat(self._address, body, timeout_s=self._timeout_s)
        generation = generation_of(answer, latency_s=time.monotonic() - began)
        self._conversation.append(answer["choices"][0]["message"])
        return generation

    async def close(self) -> SessionRecord | None:
        """The record; None where no turn was ever asked for. An episode that ended waits for no turn, so one in flight is aborted."""
        return None if self._address is None else await self._sessions.close(self._address, abort=True)


@register_agent_loop("multi_turn_completion_agent")
class MultiTurnCompletionAgentLoop(MultiTurnAgentLoop):
    """`multi_turn_agent` through the gateway: with the same seeds it samples the same ids."""

    needs_sessions: ClassVar[bool] = True
    """A run that plays this loop starts its gateway."""

    def __init__(self, parts: LoopParts) -> None:
        """As its base, and refuses a run without a gateway.

        Raises:
            ConfigError: There is no gateway, or a default name is misspelt.
        """
        super().__init__(parts)
        self._sessions = sessions_of(parts)

    async def run(self, task: Task, ticket: EpisodeTicket) -> LoopResult:
        """Play one episode; environment and session are closed whatever happens."""
        turns = SessionTurns(
            self._sessions,
            session_spec_of(self._parts, ticket, self._limits),
            [tool.schema for tool in self._parts.tools],
            timeout_s=self._limits.episode_timeout_s,
        )
        try:
            result = await self.play(task, ticket, turns)
        except asyncio.CancelledError:
            await failure_or(turns.close())
            raise
        return as_captured(result, await failure_or(turns.close()))


def as_captured(result: LoopResult, record: SessionRecord | Failure | None) -> LoopResult:
    """The result with the session's trajectories in place of those that the agent data built; `infra_error` unless both say the same."""
    if record is None:
        return result
    if isinstance(record, Failure):
        return _unusable(result, f"the session's record is lost: {record.error}", {f"errors/{record.name}": 1.0})
    captured = [step for trajectory in record.trajectories for step in trajectory.steps]
    built = [step for trajectory in result.trajectories for step in trajectory.steps]
    trajectories = record.trajectories
    if result.outcome in (Outcome.TIMEOUT, Outcome.ABORTED) and len(captured) == len(built) + 1:
        captured.pop()  # It was sampled, but the episode's end was faster than its answer: nobody has seen it.
        trajectories = result.trajectories
    drift = num_differing_tokens(built, captured)
    session_counts = {name: value for name, value in record.counts.items() if name.startswith(SESSION_COUNTS)}
    result = replace(result, counts={**result.counts, **session_counts, "tokens/drift": float(drift)}, trajectories=trajectories)
    if drift == 0:
        return result
    text = f"session {record.id} of {record.uid}: {drift} tokens of its record differ from what the agent data built"
    return _unusable(result, text, {})


def num_differing_tokens(built: Sequence[Step], captured: Sequence[Step]) -> int:
    """Places at which two records of the same turns have another token, or the same with another mask, logprob or version.

    Example:
        Ids 1 2 | 3 4 against 1 2 | 3 5 6 (sampled after the bar) -> 2: one differs, one is there once only.
    """
    return sum(ours != theirs for ours, theirs in zip_longest(_tokens_of(built), _tokens_of(captured)))


def _tokens_of(steps: Sequence[Step]) -> Iterator[tuple[Any, ...]]:
    for turn, step in enumerate(steps):
        yield from ((turn, token) for token in step.observation_ids)
        yield from zip([turn] * len(step.sampled_ids), step.sampled_ids, step.logprobs, step.policy_versions, strict=True)


def _unusable(result: LoopResult, error: str, counts: dict[str, float]) -> LoopResult:
    errors = "; ".join(filter(None, (result.error, error)))
    return replace(result, outcome=Outcome.INFRA_ERROR, error=errors, counts={**result.counts, **counts})


def _openai_message(message: Message) -> dict[str, Any]:
    raw = message.to_template()
    for call in raw.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return raw
