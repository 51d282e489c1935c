"""Programs that play episodes; importing this package registers those that psrl brings."""

from psrl.agent_loops import completion, generate, mini_swe, multi_turn
from psrl.agent_loops.base import LoopParts, agent_loops, build_agent_loop, register_agent_loop
from psrl.agent_loops.runner import EpisodePool, EpisodeRunner
from psrl.agent_loops.session import AgentEnd, CommandAgentLoop, SessionAgentLoop

__all__ = [
    "AgentEnd",
    "CommandAgentLoop",
    "EpisodePool",
    "EpisodeRunner",
    "LoopParts",
    "SessionAgentLoop",
    "agent_loops",
    "build_agent_loop",
    "completion",
    "generate",
    "mini_swe",
    "multi_turn",
    "register_agent_loop",
]
