"""`psrl.rollout_gateway`: SMG and the session router, for agents that reach the policy as an OpenAI API."""

from dataclasses import dataclass

SESSION_LOOPS = ("mini_swe_agent", "multi_turn_completion_agent")
"""Shipped loops whose turns are chat completions in a session: a run that names one of them starts the gateway by itself."""


@dataclass(kw_only=True)
class RolloutGatewayConfig:
    """The gateway of a run."""

    enable: bool = False
    """Start the gateway whatever the default loops are (rows, or classes of the user's, may need it), and send native turns through SMG."""
    agent_sampling: str = "override"
    """A sampling parameter of the agent's that breaks the run's: `override` it and count it, or `refuse` the request."""
    session_idle_timeout_s: float = 3600.0
    """After so long without a request a session is forgotten."""
    max_sessions: int = 4096
    """Open at once."""
    retry_for_s: float = 30.0
    """How long a turn is tried again when an engine or SMG fails, counted from its first failure; SMG's restart takes a second."""
    max_restarts: int = 5
    """How often SMG may end within restart_window_s before the run stops."""
    restart_window_s: float = 300.0
