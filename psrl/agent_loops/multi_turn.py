"""`multi_turn_agent`: the task-agnostic driver, environment -> agent data -> model -> agent data -> environment, until the end.

A new task never edits this file: it brings an Environment and an AgentData.
"""

from __future__ import annotations

import asyncio
from typing import Any

from psrl.agent_data.base import AgentDataParts, agent_data, build_agent_data
from psrl.agent_loops.base import AgentLoop, Failure, LoopParts, failure_or, register_agent_loop
from psrl.agent_loops.deadline import EpisodeOutOfTimeError, within
from psrl.agent_loops.limits import Limits
from psrl.agent_loops.playing import EngineTurns, PlayedEpisode, TurnSource, temperature_of
from psrl.environments.base import EnvironmentParts, build_environment, environments
from psrl.protocols import AgentData, Environment
from psrl.types import EpisodeTicket, FinishReason, LoopResult, Outcome, Task, TrajectoryUid

DRIVER_GRACE_S = 15.0
"""Longer than the grace of what the driver waits for, so that it can end first."""


async def multi_turn_agent_loop(episode: PlayedEpisode) -> Outcome:
    """Play from reset to the end.

    The limits are looked at before each generation. A turn that the engine cut (`length`) is kept in the trajectory but never reaches
    the environment, so half a call is never executed.

    Raises:
        OutOfTimeError: A step ran out of its seconds.
        EngineError, SandboxError, EnvironmentFault: Something that says nothing about the policy failed.
    """
    data = episode.agent_data
    observation, info = await episode.reset()
    data.begin(episode.task, observation, info)
    while True:
        max_tokens = episode.next_turn()
        if isinstance(max_tokens, Outcome):
            return max_tokens
        generation = await episode.generate(max_tokens)
        action = data.act(generation, temperature=episode.temperature)
        if generation.finish_reason is FinishReason.LENGTH:
            return Outcome.MAX_TOKENS
        observation, done, info = await episode.step(action)
        if done:
            return Outcome.FINISHED
        data.observe(observation, info)


@register_agent_loop("multi_turn_agent")
class MultiTurnAgentLoop(AgentLoop):
    """Native episodes of many turns; `tool_env` with `tool_agent_data` unless the task or the run says otherwise."""

    default_environment = "tool_env"
    default_agent_data = "tool_agent_data"

    def __init__(self, parts: LoopParts) -> None:
        """Looks the default names up, so that a misspelt one fails at the start.

        Raises:
            ConfigError: `rollout.agent.env.name` or `rollout.agent.data.name` names nothing.
        """
        self._parts = parts
        self._limits = self.limits_of(parts)
        agent = parts.rollout.agent
        self._environment_name = agent.env.name or self.default_environment
        self._agent_data_name = agent.data.name or self.default_agent_data
        environments.resolve(self._environment_name)
        agent_data.resolve(self._agent_data_name)

    def limits_of(self, parts: LoopParts) -> Limits:
        """The limits of this loop's episodes."""
        return Limits.from_rollout(parts.rollout)

    async def run(self, task: Task, ticket: EpisodeTicket) -> LoopResult:
        """Play one episode; the environment is closed whatever happens.

        Raises:
            ConfigError: The task's own `env_class` or `data_class` names nothing.
        """
        return await self.play(task, ticket, EngineTurns(self._parts.generator, self._parts.rollout, ticket))

    async def play(self, task: Task, ticket: EpisodeTicket, turns: TurnSource) -> LoopResult:
        """Play one episode whose turns come from `turns`. As `run`."""
        episode = PlayedEpisode(
            task,
            ticket,
            environment=self._make_environment(task.env_class or self._environment_name),
            agent_data=self._make_agent_data(task.data_class or self._agent_data_name, TrajectoryUid(f"{ticket.uid}-t0")),
            turns=turns,
            temperature=temperature_of(self._parts.rollout, ticket),
            limits=self._limits,
        )
        try:
            end = await failure_or(self._drive(episode, self._parts.truncations.of(ticket.uid)))
            submission = await failure_or(episode.submission(end.outcome if isinstance(end, Failure) else end))
        except asyncio.CancelledError:
            await failure_or(episode.close())
            raise
        closed = await failure_or(episode.close())
        return episode.result(end, submission=submission, close_failure=closed)

    async def _drive(self, episode: PlayedEpisode, truncation: asyncio.Event) -> Outcome:
        try:
            return await within(
                multi_turn_agent_loop(episode),
                timeout_s=self._limits.episode_timeout_s,
                what="an episode",
                grace_s=DRIVER_GRACE_S,
                error_class=EpisodeOutOfTimeError,
                truncation=truncation,
            )
        except EpisodeOutOfTimeError as error:
            raise episode.out_of_time() from error

    def _make_environment(self, name: str) -> Environment[Any, Any]:
        return build_environment(name, environment_parts(self._parts))

    def _make_agent_data(self, name: str, trajectory_uid: TrajectoryUid) -> AgentData[Any, Any]:
        parts = AgentDataParts(
            renderer=self._parts.renderer,
            trajectory_uid=trajectory_uid,
            tool_schemas=tuple(tool.schema for tool in self._parts.tools),
            multi_turn=self._parts.rollout.multi_turn,
            agent_loop_config_path=self._parts.rollout.agent.agent_loop_config_path,
            sandbox_wall_s=self._parts.sandbox_limits.wall_s,
        )
        return build_agent_data(name, parts)


def environment_parts(parts: LoopParts) -> EnvironmentParts:
    """What a loop hands on to its environments."""
    return EnvironmentParts(
        tools=parts.tools,
        sandboxes=parts.sandboxes,
        sandbox_limits=parts.sandbox_limits,
        multi_turn=parts.rollout.multi_turn,
        agent_loop_config_path=parts.rollout.agent.agent_loop_config_path,
    )
