"""Groups on their way between controller and agent workers, and the agent worker's plain object.

A group is played whole in one worker: members that end infra_error are played again there, alone and bounded, and the rows of
all members go to the data plane in one call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from psrl.agent_loops.base import LoopParts
from psrl.agent_loops.mini_swe_server import agent_server
from psrl.agent_loops.runner import EpisodePool, EpisodeRunner
from psrl.chat.renderer import load_renderer
from psrl.config.agent_checks import plays_mini_swe
from psrl.config.model import ModelConfig
from psrl.config.reward import CustomRewardFunctionConfig, RewardConfig
from psrl.config.rollout import RolloutConfig
from psrl.config.rollout_gateway import RolloutGatewayConfig
from psrl.config.sandbox import SandboxConfig, engine_url_of
from psrl.data_plane import KVBatchMeta, Partition, rows_of
from psrl.data_plane.memory import meta_of
from psrl.data_plane.transfer_queue import TransferQueueDataPlane
from psrl.engine_client.client import HttpGenerator
from psrl.gateway.gateway import GatewayAddress
from psrl.protocols import ProgramRunner, Scorer, Tool
from psrl.rewards.base import ScorerParts
from psrl.rewards.scorer import build_scorer
from psrl.runtime.imports import make_importable
from psrl.sandbox import BackendSandboxes, build_interpreter, limits_of, reap
from psrl.session_client.client import SessionClient
from psrl.telemetry.trajectories import lengths_of_turns
from psrl.tools.config import load_tools
from psrl.types import AgentSampling, Episode, EpisodeTicket, EpisodeUid, GroupUid, Outcome, Task, Timings

DIRECT_RETRY_FOR_S = 2.0
"""Of a turn that goes to an engine without SMG: a dead engine ends the run, so only a passing fault is worth another attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentWorkerSettings:
    """What an agent worker is made of."""

    model: ModelConfig
    gen_rollout: RolloutConfig
    val_rollout: RolloutConfig
    reward: RewardConfig
    custom_reward_function: CustomRewardFunctionConfig
    sandbox: SandboxConfig
    rollout_gateway: RolloutGatewayConfig
    max_episode_retries: int
    data_plane_deadline_s: float
    startup_deadline_s: float
    import_folder: str
    """Put on sys.path, so that a user's own environment beside their YAML is found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoints:
    """Where episodes send their turns."""

    generate_urls: Sequence[str]
    """Of native turns: the engines, or SMG in front of them."""
    gateway: GatewayAddress | None = None
    """Of turns in sessions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """Play these episodes of one task."""

    task: Task
    tickets: tuple[EpisodeTicket, ...]
    wants_records: bool
    """Whether the full episodes come back, for the run folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSummary:
    """What the controller needs to know of an episode."""

    uid: EpisodeUid
    outcome: Outcome
    reward: float | None
    accuracy: float | None
    num_turns: int
    """Of all branches; a turn with which several of them begin counts once."""
    num_sampled: int
    """Tokens of these turns."""
    counts: dict[str, float]
    timings: Timings
    temperature: float | None
    """As the ticket asked; None is the rollout's own."""
    error: str | None
    num_retries: int
    """How often it was played again after `infra_error`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupResult:
    """A group in which every episode has an outcome."""

    group: GroupUid
    summaries: tuple[EpisodeSummary, ...]
    meta: KVBatchMeta
    """Rows in the data plane; empty for validation."""
    records: tuple[Episode, ...]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the members that could be judged."""
        return [summary.reward for summary in self.summaries if summary.reward is not None]


class AgentWorker:
    """Plays groups. Owns tokenizer, tools, sandboxes and graders of one process."""

    def __init__(self, settings: AgentWorkerSettings) -> None:
        self._settings = settings
        make_importable(settings.import_folder)
        self._data_plane = TransferQueueDataPlane(deadline_s=settings.data_plane_deadline_s, startup_deadline_s=settings.startup_deadline_s)
        self._sandboxes = BackendSandboxes(settings.sandbox)
        self._program_runner: ProgramRunner = build_interpreter(settings.sandbox)
        self._is_runner_used = False
        self._tools: list[Tool] = []
        self._scorer: Scorer | None = None
        self._generator: HttpGenerator | None = None
        self._sessions: SessionClient | None = None
        self._train_pool: EpisodePool | None = None
        self._val_pool: EpisodePool | None = None

    async def start(self) -> None:
        """Remove what dead workers left here, load the tokenizer, warm the sandboxes, check tools and graders with known answers."""
        s = self._settings
        await asyncio.to_thread(reap, engine_url=engine_url_of(s.sandbox))
        self._renderer = await asyncio.to_thread(
            load_renderer,
            s.model.tokenizer_path or s.model.path,
            tool_format=s.gen_rollout.multi_turn.format,
            history_thinking=s.model.history_thinking,
        )
        scorer_parts = ScorerParts(
            reward=s.reward, custom=s.custom_reward_function, sandboxes=self._sandboxes, allow_network=s.sandbox.allow_network
        )
        self._scorer = build_scorer(scorer_parts)
        tool_path = s.gen_rollout.multi_turn.tool_config_path
        if tool_path is not None:
            self._is_runner_used = True
            await self._program_runner.preflight()
            self._tools = load_tools(tool_path, program_runner=self._program_runner)
        if any(plays_mini_swe(rollout) for rollout in (s.gen_rollout, s.val_rollout)):
            await self._sandboxes.preflight()
        await self._scorer.self_test()

    async def connect(self, endpoints: Endpoints) -> None:
        """Attach to engines, gateway and data plane."""
        await asyncio.to_thread(self._data_plane.connect)
        s = self._settings
        self._generator = HttpGenerator(
            endpoints.generate_urls,
            request_timeout_s=s.gen_rollout.request_timeout_s,
            retry_for_s=s.rollout_gateway.retry_for_s if s.rollout_gateway.enable else DIRECT_RETRY_FOR_S,
        )
        if endpoints.gateway is not None:
            self._sessions = SessionClient(endpoints.gateway.url, admin_key=endpoints.gateway.admin_key)
        self._train_pool = self._pool_of(s.gen_rollout, self._generator)
        self._val_pool = self._pool_of(s.val_rollout, self._generator)

    def _pool_of(self, rollout: RolloutConfig, generator: HttpGenerator) -> EpisodePool:
        parts = LoopParts(
            renderer=self._renderer,
            generator=generator,
            tools=self._tools,
            sandboxes=self._sandboxes,
            sandbox_limits=replace(limits_of(self._settings.sandbox), allow_network=self._settings.sandbox.allow_network),
            rollout=rollout,
            sessions=self._sessions,
            agent_sampling=AgentSampling(self._settings.rollout_gateway.agent_sampling),
        )
        assert self._scorer is not None, "start() comes first"
        max_concurrent = rollout.agent.max_concurrent_episodes
        score_timeout_s = self._settings.reward.score_timeout_s(max_concurrent=max_concurrent)
        return EpisodePool(EpisodeRunner(parts, self._scorer, score_timeout_s=score_timeout_s), max_concurrent=max_concurrent)

    async def run_group(self, request: GroupRequest) -> GroupResult:
        """Play all members at once; returns when each has an outcome."""
        played = await asyncio.gather(*(self._play(request.task, ticket) for ticket in request.tickets))
        episodes = [episode for episode, _ in played]
        is_validation = request.tickets[0].is_validation
        rows = [] if is_validation else [row for episode in episodes for row in rows_of(episode)]
        meta = await asyncio.to_thread(self._data_plane.put, rows) if rows else meta_of([], Partition.TRAIN)
        return GroupResult(
            group=request.tickets[0].group,
            summaries=tuple(summary_of(episode, num_retries) for episode, num_retries in played),
            meta=meta,
            records=tuple(episodes) if request.wants_records else (),
        )

    async def _play(self, task: Task, ticket: EpisodeTicket) -> tuple[Episode, int]:
        pool = self._val_pool if ticket.is_validation else self._train_pool
        assert pool is not None, "connect() comes first"
        num_retries = 0
        while True:
            episode = await pool.run(task, ticket)
            if episode.result.outcome is not Outcome.INFRA_ERROR or num_retries == self._settings.max_episode_retries:
                return episode, num_retries
            num_retries += 1

    async def stop(self) -> None:
        """End sandboxes, graders and connections."""
        if self._scorer is not None:
            await self._scorer.close()
        for tool in self._tools:
            await tool.close()
        if self._is_runner_used:
            await self._program_runner.stop()
        if self._generator is not None:
            await self._generator.close()
        if self._sessions is not None:
            await self._sessions.aclose()
        await asyncio.to_thread(agent_server().close)


def summary_of(episode: Episode, num_retries: int) -> EpisodeSummary:
    """What the controller needs to know of an episode."""
    turn_lengths = lengths_of_turns(episode.result.trajectories)
    return EpisodeSummary(
        uid=episode.ticket.uid,
        outcome=episode.result.outcome,
        reward=episode.score.reward,
        accuracy=episode.score.accuracy,
        num_turns=len(turn_lengths),
        num_sampled=sum(turn_lengths),
        counts=episode.result.counts,
        timings=episode.timings,
        temperature=episode.ticket.temperature,
        error=episode.result.error,
        num_retries=num_retries,
    )
