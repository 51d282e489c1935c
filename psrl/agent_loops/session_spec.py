"""What the session of an episode is bound to: its ticket, and the rollout's sampling and limits."""

from __future__ import annotations

from psrl.agent_loops.base import LoopParts
from psrl.agent_loops.limits import Limits
from psrl.agent_loops.playing import temperature_of
from psrl.errors import ConfigError
from psrl.session_client.client import SessionClient
from psrl.types import EpisodeTicket, SamplingContract, SessionLimits, SessionSpec


def session_spec_of(parts: LoopParts, ticket: EpisodeTicket, limits: Limits) -> SessionSpec:
    """The body of the session's opening; its turns are sampled as those of a native loop with the same ticket."""
    rollout = parts.rollout
    return SessionSpec(
        uid=ticket.uid,
        group=ticket.group,
        admitted_version=ticket.admitted_version,
        is_validation=ticket.is_validation,
        contract=SamplingContract(
            seed=ticket.seed,
            temperature=temperature_of(rollout, ticket),
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            agent_sampling=parts.agent_sampling,
        ),
        limits=SessionLimits(
            max_turns=limits.max_turns,
            prompt_length=limits.prompt_length,
            response_length=limits.response_length,
            max_tokens_per_turn=limits.max_tokens_per_turn,
        ),
    )


def sessions_of(parts: LoopParts) -> SessionClient:
    """The run's gateway, for a loop that cannot do without.

    Raises:
        ConfigError: The run has none.
    """
    if parts.sessions is None:
        raise ConfigError(
            key="rollout.agent.default_agent_loop",
            value=parts.rollout.agent.default_agent_loop,
            rule="its turns are chat completions, which need the run's gateway, and this run has none",
            fix="set psrl.rollout_gateway.enable=true",
        )
    return parts.sessions
