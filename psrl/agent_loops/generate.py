"""`generate_only_agent`: one question, one answer. The same driver, with one turn."""

from __future__ import annotations

from dataclasses import replace

from psrl.agent_loops.base import LoopParts, register_agent_loop
from psrl.agent_loops.limits import Limits
from psrl.agent_loops.multi_turn import MultiTurnAgentLoop


@register_agent_loop("generate_only_agent")
class GenerateAgentLoop(MultiTurnAgentLoop):
    """Native episodes of one turn; `single_turn` with `conversation` unless the task or the run says otherwise."""

    default_environment = "single_turn"
    default_agent_data = "conversation"

    def limits_of(self, parts: LoopParts) -> Limits:
        """One turn, whatever `multi_turn.max_turns` says."""
        return replace(super().limits_of(parts), max_turns=1)
