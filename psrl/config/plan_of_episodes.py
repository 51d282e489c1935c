"""What the plan holds for the episodes that a run plays at once: sandboxes, and the processes of black-box agents.

Sizes are measured on Linux, as the memory that each adds to what it shares with others. A command may use `sandbox.memory_mb` while it
runs; as many are planned to do so at once as there are cores.
"""

from __future__ import annotations

from psrl.config.agent_checks import MINI_SWE_LOOP, plays_mini_swe
from psrl.config.planned_process import MIB, PlannedProcess
from psrl.config.tree import Config

WARM_AGENT_BYTES = 210 * MIB
AGENT_FORK_BYTES = 25 * MIB
GUEST_BYTES = 15 * MIB
AGENT = "gen_actor_rollout_ref.rollout.agent"


def processes_of_episodes(config: Config, *, num_cores: int) -> tuple[PlannedProcess, ...]:
    """In the order in which the plan shows them."""
    rollout = config.gen_actor_rollout_ref.rollout
    limit_bytes, rows = config.sandbox.memory_mb * MIB, []
    if rollout.multi_turn.tool_config_path is not None and config.sandbox.backend != "sandbox_fusion":
        count = config.sandbox.num_workers * rollout.agent.num_workers
        rows.append(_waiting("sandbox", count, limit_bytes, "its limit, sandbox.memory_mb", "sandbox.memory_mb"))
    if plays_mini_swe(rollout):
        num_episodes, key = episodes_at_once(config), f"{AGENT}.max_concurrent_episodes"
        if rollout.agent.default_agent_loop == MINI_SWE_LOOP:
            rows.append(
                _waiting("warm mini-swe-agent", rollout.agent.num_workers, WARM_AGENT_BYTES, "its libraries", f"{AGENT}.num_workers")
            )
            rows.append(_waiting("mini-swe-agent", num_episodes, AGENT_FORK_BYTES, "a fork per episode", key))
        rows.append(_waiting("sandbox of an episode", num_episodes, GUEST_BYTES, "between commands", key))
        num_commands = min(num_episodes, num_cores)
        rows.append(_waiting("command", num_commands, limit_bytes, "its limit, sandbox.memory_mb; one per core", "sandbox.memory_mb"))
    return tuple(rows)


def episodes_at_once(config: Config) -> int:
    """Training episodes in flight: one step's, or as many as agent workers have places for."""
    agent = config.gen_actor_rollout_ref.rollout.agent
    return min(agent.num_workers * agent.max_concurrent_episodes, config.data.train_batch_size * config.psrl.rollout_n)


def _waiting(role: str, count: int, memory_bytes: int, reason: str, key: str) -> PlannedProcess:
    return PlannedProcess(role=role, count=count, num_cores=0, memory_bytes=memory_bytes, reason=reason, key=key)
