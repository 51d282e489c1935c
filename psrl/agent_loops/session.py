"""Black-box agents: any program that speaks OpenAI's or Anthropic's API plays the episode, and its session is the record.

How an episode ends; the first line that holds:

| what happened | outcome |
|---|---|
| the session's record is lost | `infra_error` |
| the agent's end says `infra_error`: its place was lost, so that nobody can say what it did | `infra_error` |
| no turn was captured (where turns are captured), and psrl ended the episode early | `aborted` |
| no turn was captured, so there is nothing to judge | `infra_error`, which names the session |
| the agent ran into a limit of the session, whatever it did then | `max_turns`, `max_tokens` |
| the last turn that it asked for could not be sampled | `infra_error` |
| psrl ended the episode early (a truncation) | `timeout` |
| `episode_timeout_s` passed, and turns waited for engines most of it | `infra_error` |
| `episode_timeout_s` passed | `timeout` |
| the agent raised an error of psrl's own (`SandboxError`, `EnvironmentFault`, ...), but AgentError | `infra_error` |
| the agent raised anything else, or its command ended with another code than 0 | `agent_error` |
| the agent returned | `finished` |

Cancellation reaches the agent, then its session and through it the engines, and goes on.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, ClassVar

from psrl.agent_loops.agent_process import AgentProcess
from psrl.agent_loops.agent_thread import AgentThread, without_exit
from psrl.agent_loops.base import Failure, LoopParts, failure_or
from psrl.agent_loops.branches import trained_branches
from psrl.agent_loops.deadline import within
from psrl.agent_loops.limits import Limits
from psrl.agent_loops.session_spec import session_spec_of, sessions_of
from psrl.errors import AgentError
from psrl.protocols import AgentLoop
from psrl.types import (
    EpisodeTicket,
    LoopResult,
    Message,
    Outcome,
    Role,
    SessionAddress,
    SessionId,
    SessionRecord,
    Submission,
    Task,
    Timings,
)

AGENT_GRACE_S = 15.0
"""Longer than an agent's process takes to be killed."""
THREAD_GRACE_S = 5.0
"""A thread cannot be killed; its next request to the session fails, and it has so long to end of it."""

Numbers = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentEnd:
    """How an agent ended, for loops that know more of it than that it returned."""

    outcome: Outcome = Outcome.FINISHED
    """Where the session itself says nothing else."""
    error: str | None = None
    counts: Numbers = field(default_factory=dict)
    """Under the names that they are counted as, such as `env/commands`."""
    submission: Submission | None = None
    messages: tuple[Message, ...] = ()
    """The conversation as the agent saw it, for where nothing is captured of its session."""
    is_truncation: bool = False
    """Whether it ended because psrl ended the episode early; then `outcome` is `timeout`."""


class SessionAgentLoop(AgentLoop):
    """An agent that is called from Python. A subclass says how, in `run_agent`.

    Example:
        class HaikuAgentLoop(SessionAgentLoop):
            async def run_agent(self, task, address):
                async with AsyncOpenAI(base_url=address.base_url, api_key=address.api_key) as client:
                    question = {"role": "user", "content": task.prompt[-1].content}
                    await client.chat.completions.create(model="policy", messages=[question])
    """

    needs_sessions: ClassVar[bool] = True
    """A run that plays this loop starts its gateway."""
    takes_truncation: ClassVar[bool] = False
    """Whether `run_agent` itself ends early when `truncation_of` its address is set; else it is cancelled."""

    def __init__(self, parts: LoopParts) -> None:
        """One object serves all episodes of a worker, many at once.

        Raises:
            ConfigError: The run has no gateway.
        """
        self._sessions = sessions_of(parts)
        self._parts = parts
        self._limits = Limits.from_rollout(parts.rollout)
        self._truncations: dict[SessionId, asyncio.Event] = {}

    def run_agent(self, task: Task, address: SessionAddress) -> Any:
        """Run the agent on `task` until it is done: an `async def`, or a `def`, which gets a thread of its own.

        The policy answers at `address.base_url` (Anthropic's API: `address.url`) to `address.api_key`, whatever the model's name.
        Numbers by name that this returns are counted as `agent/<name>`; an `AgentEnd` is taken as it is; anything else is dropped.
        """
        raise NotImplementedError(f"{type(self).__name__} has no run_agent")

    @property
    def run_timeout_s(self) -> float:
        """The deadline of `run_agent`."""
        return self._limits.episode_timeout_s

    def truncation_of(self, address: SessionAddress) -> asyncio.Event:
        """Set as soon as the episode of this session is to end with what it has."""
        return self._truncations[address.id]

    async def run(self, task: Task, ticket: EpisodeTicket) -> LoopResult:
        """Play one episode; agent and session are ended whatever happens.

        Raises:
            GatewayError: No session could be opened.
        """
        began = time.monotonic()
        address = await self._sessions.open(session_spec_of(self._parts, ticket, self._limits))
        thread = AgentThread(f"psrl agent {ticket.uid}")
        self._truncations[address.id] = self._parts.truncations.of(ticket.uid)
        try:
            end = await failure_or(self._play(task, address, thread), of_others=Outcome.AGENT_ERROR)
        except asyncio.CancelledError:
            await failure_or(self._sessions.close(address, abort=True))
            await thread.has_ended(THREAD_GRACE_S)
            raise
        finally:
            del self._truncations[address.id]
        # Turns that an agent left behind at its end wait for nobody, so they are aborted.
        record = await failure_or(self._sessions.close(address, abort=True))
        is_left = not await thread.has_ended(THREAD_GRACE_S)
        return self._result(task, end, record, total_s=time.monotonic() - began, is_left=is_left)

    async def _play(self, task: Task, address: SessionAddress, thread: AgentThread) -> AgentEnd:
        if inspect.iscoroutinefunction(self.run_agent):
            work = without_exit(self.run_agent(task, address))
        else:
            work = thread.run(lambda: self.run_agent(task, address))
        returned = await within(
            work,
            timeout_s=self.run_timeout_s,
            what=type(self).__name__,
            grace_s=AGENT_GRACE_S,
            truncation=None if self.takes_truncation else self.truncation_of(address),
        )
        if isinstance(returned, AgentEnd):
            return returned
        numbers = returned.items() if isinstance(returned, Mapping) else ()
        return AgentEnd(
            counts={f"agent/{name}": float(value) for name, value in numbers if isinstance(value, Real) and math.isfinite(value)}
        )

    def _result(self, task: Task, end: AgentEnd | Failure, record: SessionRecord | Failure, *, total_s: float, is_left: bool) -> LoopResult:
        outcome, why = _outcome_of(end, record, self._limits.episode_timeout_s)
        failures = [part for part in (end, record) if isinstance(part, Failure)]
        errors = [part.error for part in (end, record) if isinstance(part, AgentEnd | Failure) and part.error]
        left = "the agent's thread is still running" if is_left else None
        counts = Counter({f"errors/{failure.name}": 1.0 for failure in failures})
        counts.update({"agent/left_running": 1.0} if is_left else {})
        counts.update({} if isinstance(end, Failure) else end.counts)
        captured = None if isinstance(record, Failure) else record
        told = () if isinstance(end, Failure) else end.messages
        if captured is not None:
            counts.update({**captured.counts, **({"turns": float(captured.num_turns)} if captured.is_captured else {})})
        generation_s = captured.generation_s if captured else 0.0
        return LoopResult(
            outcome=outcome,
            trajectories=trained_branches(captured, self._parts.rollout.agent.branch_reward) if captured else (),
            messages=captured.messages if captured and captured.messages else told or task.prompt,
            turn_texts=captured.turn_texts if captured and captured.is_captured else tuple(_texts_of(told)),
            counts=dict(counts),
            timings=Timings(total_s=total_s, generation_s=generation_s, tools_s=max(0.0, total_s - generation_s)),
            submission=None if isinstance(end, Failure) else end.submission,
            error="; ".join(filter(None, (why, *errors, left))) or None,
        )


class CommandAgentLoop(SessionAgentLoop):
    """An agent that is a command, run as a child process. A subclass says which, in `command`.

    Example:
        class ShellAgentLoop(CommandAgentLoop):
            def command(self, task, address, folder):
                return ["some-agent", "--model", "policy", "--yes", task.prompt[-1].content]
    """

    def command(self, task: Task, address: SessionAddress, folder: Path) -> Sequence[str]:
        """The program and its arguments. It runs in `folder`, which is empty but for what is written into it here."""
        raise NotImplementedError(f"{type(self).__name__} has no command")

    def environment(self, task: Task, address: SessionAddress, folder: Path) -> dict[str, str]:
        """Variables of the process beside PATH, HOME, TMPDIR and LANG: the session's address, as agents look for it."""
        return {
            "OPENAI_BASE_URL": address.base_url,
            "OPENAI_API_BASE": address.base_url,
            "OPENAI_API_KEY": address.api_key,
            "ANTHROPIC_BASE_URL": address.url,
            "ANTHROPIC_API_KEY": address.api_key,
        }

    async def run_agent(self, task: Task, address: SessionAddress) -> Numbers:
        """Run the command to its end.

        Raises:
            AgentError: It ended with another code than 0; with the end of its output.
        """
        async with AgentProcess() as process:
            argv = list(self.command(task, address, process.folder))
            end = await process.run(argv, self.environment(task, address, process.folder))
        if end.exit_code != 0:
            raise AgentError(f"{argv[0]} ended with {end.exit_code}; its last output: {end.output_tail or '(none)'}")
        return {"output_bytes": end.num_output_bytes}


def _texts_of(messages: Sequence[Message]) -> list[str]:
    return [message.content for message in messages if message.role is Role.ASSISTANT]


def _outcome_of(end: AgentEnd | Failure, record: SessionRecord | Failure, timeout_s: float) -> tuple[Outcome, str | None]:
    if isinstance(record, Failure):
        return Outcome.INFRA_ERROR, "the session's record is lost"
    if isinstance(end, AgentEnd) and end.outcome is Outcome.INFRA_ERROR:
        return Outcome.INFRA_ERROR, None
    if record.num_turns == 0 and record.is_captured:
        text = f"session {record.id} of {record.uid} captured no turn: {record.error or 'the agent asked for none'}"
        return Outcome.ABORTED if end.is_truncation else Outcome.INFRA_ERROR, text
    if end.is_truncation and record.end is Outcome.INFRA_ERROR:
        return end.outcome, None  # The turn that it waited for was cut with it.
    if record.end is not None:
        return record.end, record.error
    if end.is_truncation:
        return end.outcome, None
    if end.outcome is Outcome.TIMEOUT and record.generation_s > timeout_s / 2:
        return Outcome.INFRA_ERROR, f"turns waited {record.generation_s:.2f} s for engines"
    return end.outcome, None
