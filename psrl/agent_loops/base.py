"""Agent loops by name, what they are made from, and how a failure becomes an outcome.

| what ended the episode | outcome |
|---|---|
| a step ran out of its seconds, or the episode of its own while the environment used most of them | `timeout` |
| the episode ran out of its seconds while the engines used most of them | `infra_error` |
| psrl ended it early (a truncation), whoever used the time | `timeout` |
| `AgentError` | `agent_error` |
| engine, sandbox, data plane, `reset`, an environment's own bug, an unknown name in a row | `infra_error` |
| any of the above before the policy sampled a token | `infra_error`: there is nothing to judge; of a truncation `aborted` |
| cancellation | none: the environment is closed and the cancellation goes on |
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from psrl.agent_loops.deadline import OutOfTimeError, TruncatedError, Truncations
from psrl.config.rollout import RolloutConfig
from psrl.errors import AgentError, PsrlError
from psrl.protocols import AgentLoop, Generator, Renderer, Sandboxes, Tool
from psrl.registry import Registry
from psrl.session_client.client import SessionClient
from psrl.types import AgentSampling, Outcome, SandboxLimits

__all__ = ["AgentLoop", "Failure", "LoopParts", "agent_loops", "build_agent_loop", "failure_or", "register_agent_loop"]

T = TypeVar("T")

agent_loops: Registry[Callable[..., AgentLoop]] = Registry("agent loop", key="rollout.agent.default_agent_loop")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopParts:
    """What an agent loop is made from. One loop serves all episodes of a worker, many at once, so it holds no episode state."""

    renderer: Renderer
    generator: Generator
    tools: Sequence[Tool] = ()
    sandboxes: Sandboxes | None = None
    """The run's; None where none of its loops and environments needs any."""
    sandbox_limits: SandboxLimits = field(default_factory=SandboxLimits)
    """Of an episode's sandbox, as the run's `sandbox` section says; the network is for tasks that ask for it."""
    rollout: RolloutConfig
    sessions: SessionClient | None = None
    """The run's gateway; None in a run that has none, which only loops with sessions mind."""
    agent_sampling: AgentSampling = AgentSampling.OVERRIDE
    """`psrl.rollout_gateway.agent_sampling`: what becomes of an agent's own sampling parameters."""
    truncations: Truncations = field(default_factory=Truncations)
    """Which episodes are to end now; a loop looks up its own by the ticket's uid."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """What an exception means for the episode that it ended."""

    outcome: Outcome
    error: str
    """`ClassName: message`."""
    name: str
    """The exception's class, counted as `errors/<name>`."""
    is_truncation: bool = False
    """Whether psrl ended it early."""


def register_agent_loop(name: str) -> Callable[[type], type]:
    """Class decorator: the loop can be chosen by `name`. The class is called with `LoopParts`."""
    return agent_loops.register(name)


def build_agent_loop(name: str, parts: LoopParts) -> AgentLoop:
    """The loop of a registered name or a dotted path.

    Raises:
        ConfigError: Nothing has this name.
    """
    return agent_loops.resolve(name)(parts)


async def failure_or(work: Awaitable[T], *, of_others: Outcome = Outcome.INFRA_ERROR) -> T | Failure:
    """The boundary of an episode: what `work` gives, or what its exception means. Cancellation passes through.

    `of_others` is the outcome of an exception that is not psrl's own.
    """
    try:
        return await work
    except Exception as error:  # noqa: BLE001 an episode ends in an outcome whatever a user's environment raised
        return _failure_of(error, of_others)


def _failure_of(error: Exception, of_others: Outcome) -> Failure:
    name = type(error).__name__
    outcome = Outcome.INFRA_ERROR if isinstance(error, PsrlError) else of_others
    if isinstance(error, OutOfTimeError):
        outcome = Outcome.TIMEOUT
    elif isinstance(error, AgentError):
        outcome = Outcome.AGENT_ERROR
    return Failure(outcome=outcome, error=f"{name}: {error}", name=name, is_truncation=isinstance(error, TruncatedError))
