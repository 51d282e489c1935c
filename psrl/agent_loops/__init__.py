"""Programs that play episodes; importing this package registers those that psrl brings."""

from psrl.agent_loops import generate, multi_turn
from psrl.agent_loops.base import LoopParts, agent_loops, build_agent_loop, register_agent_loop
from psrl.agent_loops.runner import EpisodePool, EpisodeRunner

__all__ = [
    "EpisodePool",
    "EpisodeRunner",
    "LoopParts",
    "agent_loops",
    "build_agent_loop",
    "generate",
    "multi_turn",
    "register_agent_loop",
]
