"""Groups on their way between controller and agent workers, and the agent worker's plain object.

A group is played whole in one worker: members that end infra_error are played again there, alone and bounded, and the rows of
all kept members go to the data plane in one call. Where it has more members than are needed, the first that are judged are kept.
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
from psrl.data_plane import DataPlane, KVBatchMeta, oldest_version_of, rows_of
from psrl.data_plane.memory import meta_of
from psrl.data_plane.transfer_queue import TransferQueueDataPlane
from psrl.engine_client.client import HttpGenerator
from psrl.gateway.gateway import GatewayAddress
from psrl.protocols import ProgramRunner, Scorer, Tool
from psrl.rewards.base import ScorerParts
from psrl.rewards.scorer import build_scorer
from psrl.runtime.group_play import EndHow, GroupPlay, Member
from psrl.runtime.imports import make_importable
from psrl.sandbox import BackendSandboxes, build_interpreter, limits_of, reap
from psrl.session_client.client import SessionClient
from psrl.telemetry.flow import Flow
from psrl.telemetry.trajectories import lengths_of_turns
from psrl.tools.config import load_tools
from psrl.types import AgentSampling, Episode, EpisodeTicket, EpisodeUid, GroupUid, Outcome, PolicyVersion, Task, Timings


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
    validation_urls: Sequence[str] = ()
    """Of native turns of validation, where that has engines of its own."""
    gateway: GatewayAddress | None = None
    """Of turns in sessions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRequest:
    """Play these episodes of one task."""

    task: Task
    tickets: tuple[EpisodeTicket, ...]
    wants_records: bool
    """Whether the full episodes come back, for the run folder."""
    wants_rows: bool = True
    """Whether training episodes go to the data plane; those of validation never do."""
    num_needed: int | None = None
    """How many judged episodes make it complete: the others are ended then. None: all are played to their ends."""
    attempt: int = 0
    """How often the group was issued before."""


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
    """A group that has ended."""

    group: GroupUid
    summaries: tuple[EpisodeSummary, ...]
    """In the order of the tickets: the episodes that are kept, `num_needed` at most, and those that ended without a reward. Where too few
    were judged, also those that psrl ended (`aborted`)."""
    meta: KVBatchMeta
    """Rows in the data plane; empty for validation, and of a group that was cancelled."""
    records: tuple[Episode, ...]
    """Of the same episodes, but for those that never had an end of their own."""
    oldest_version: PolicyVersion | None = None
    """Of the weights that sampled tokens of its judged episodes, the oldest; None where there is none."""
    attempt: int = 0
    """As requested."""
    num_surplus: int = 0
    """Members that were ended, or not kept, because others were judged first."""
    is_cancelled: bool = False
    """Whether `end_group` cancelled it: nothing of it is kept."""

    @property
    def rewards(self) -> list[float]:
        """Rewards of the kept members that could be judged; of a cancelled group none."""
        return [] if self.is_cancelled else [summary.reward for summary in self.summaries if summary.reward is not None]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFlows:
    """What an agent worker sent and got."""

    rows: Flow
    """Put into the data plane."""
    turns: dict[str, Flow]
    """By the URL that samples them."""


class AgentWorker:
    """Plays groups. Owns tokenizer, tools, sandboxes and graders of one process."""

    def __init__(self, settings: AgentWorkerSettings, *, data_plane: DataPlane | None = None) -> None:
        """Rows go to `data_plane`, None: to the run's TransferQueue."""
        self._settings = settings
        make_importable(settings.import_folder)
        self._data_plane = data_plane
        self._sandboxes = BackendSandboxes(settings.sandbox)
        self._program_runner: ProgramRunner = build_interpreter(settings.sandbox)
        self._is_runner_used = False
        self._tools: list[Tool] = []
        self._scorer: Scorer | None = None
        self._generator: HttpGenerator | None = None
        self._val_generator: HttpGenerator | None = None
        self._sessions: SessionClient | None = None
        self._plays: dict[GroupUid, GroupPlay] = {}
        self._leaving: dict[GroupUid, asyncio.Future[list[Episode | BaseException]]] = {}
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
        s = self._settings
        if self._data_plane is None:
            queue = TransferQueueDataPlane(deadline_s=s.data_plane_deadline_s, startup_deadline_s=s.startup_deadline_s)
            await asyncio.to_thread(queue.connect)
            self._data_plane = queue
        self._generator = self._val_generator = self._generator_at(endpoints.generate_urls)
        if endpoints.validation_urls:
            self._val_generator = self._generator_at(endpoints.validation_urls)
        if endpoints.gateway is not None:
            address = endpoints.gateway
            self._sessions = SessionClient(address.url, admin_key=address.admin_key, retry_for_s=s.rollout_gateway.retry_for_s)
        self._train_pool = self._pool_of(s.gen_rollout, self._generator)
        self._val_pool = self._pool_of(s.val_rollout, self._val_generator)

    def _generator_at(self, urls: Sequence[str]) -> HttpGenerator:
        s = self._settings
        return HttpGenerator(
            urls,
            request_timeout_s=s.gen_rollout.request_timeout_s,
            retry_for_s=s.rollout_gateway.retry_for_s if s.rollout_gateway.enable else s.gen_rollout.startup_timeout_s,
        )

    @property
    def _generators(self) -> list[HttpGenerator]:
        """Each once: of training's replicas, and of validation's own."""
        return list(dict.fromkeys(each for each in (self._generator, self._val_generator) if each is not None))

    async def readdress(self, old: str, new: str) -> None:
        """An engine was started again at another URL."""
        for generator in self._generators:
            await generator.readdress(old, new)

    def take_flows(self) -> WorkerFlows:
        """What it sent and got since the last call."""
        rows = Flow() if self._data_plane is None else self._data_plane.flow.take()
        turns = {replica.url: replica.flow.take() for generator in self._generators for replica in generator.replicas}
        return WorkerFlows(rows=rows, turns=turns)

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
        """Play the members at once; returns when enough are judged, all have ended, or the group is cancelled.

        Waits for: what an earlier attempt of the group still closes here, then its members. Unblocked by: their deadlines.
        """
        tickets, group = request.tickets, request.tickets[0].group
        is_validation = tickets[0].is_validation
        pool, generator = (self._val_pool, self._val_generator) if is_validation else (self._train_pool, self._generator)
        assert pool is not None and generator is not None, "connect() comes first"
        assert group not in self._plays, f"group {group} is already played here"
        play = GroupPlay(
            pool,
            request.task,
            tickets,
            num_needed=request.num_needed or len(tickets),
            max_retries=self._settings.max_episode_retries,
        )
        before = self._leaving.pop(group, None)
        self._plays[group] = play
        try:
            if before is not None:
                await asyncio.wait([before])  # Not awaited itself: a cancellation of this call must not reach what closes.
            for ticket in tickets:
                if ticket.instance is not None:
                    generator.place(ticket.uid, ticket.instance)
            members = await play.run()
            return await self._result(request, members, is_cancelled=play.is_cancelled)
        finally:
            del self._plays[group]
            self._leave(group, play)

    async def end_group(self, group: GroupUid, how: EndHow) -> bool:
        """End a group early: `run_group` returns soon. False where it is not played here.

        Cancelled, it has no rows and its unfinished episodes are `aborted`. Truncated, its running episodes end with `timeout` and are
        judged by their finished turns; those that have none are `aborted`.
        """
        play = self._plays.get(group)
        if play is not None:
            play.end(how)
        return play is not None

    async def move_group(self, group: GroupUid, instance: int) -> int:
        """Have a group go on at another instance: running turns are given back there and continued here; how many there were."""
        play = self._plays.get(group)
        if play is None:
            return 0
        assert self._generator is not None, "connect() comes first"
        return await self._generator.move([ticket.uid for ticket in play.tickets], instance)

    async def _result(self, request: GroupRequest, members: Sequence[Member], *, is_cancelled: bool) -> GroupResult:
        assert self._data_plane is not None, "connect() comes first"
        kept = [] if is_cancelled else [member.episode for member in members if member.episode is not None]
        is_trained_on = request.wants_rows and not request.tickets[0].is_validation
        rows = [row for episode in kept for row in rows_of(episode)] if is_trained_on else []
        meta = await asyncio.to_thread(self._data_plane.put, rows) if rows else meta_of([])
        judged = [episode for episode in kept if episode.score.reward is not None]
        versions = [version for episode in judged if (version := oldest_version_of(episode)) is not None]
        return GroupResult(
            group=request.tickets[0].group,
            summaries=tuple(map(summary_of, members)),
            meta=meta,
            records=tuple(kept) if request.wants_records else (),
            oldest_version=min(versions, default=None),
            attempt=request.attempt,
            num_surplus=len(request.tickets) - len(members),
            is_cancelled=is_cancelled,
        )

    def _leave(self, group: GroupUid, play: GroupPlay) -> None:
        """Members that still close their environments are this worker's until they have; their group's next attempt waits for them.

        Until then one of them may still ask for a turn, which its cancellation has not reached: sessions are forgotten after the last.
        """

        def forget() -> None:
            for ticket in play.tickets:
                for generator in self._generators:
                    generator.forget(ticket.uid)

        def have_left(done: asyncio.Future[list[Episode | BaseException]]) -> None:
            forget()
            if self._leaving.get(group) is done:
                del self._leaving[group]

        if not play.left:
            forget()
            return
        leaving = self._leaving[group] = asyncio.gather(*play.left, return_exceptions=True)
        leaving.add_done_callback(have_left)

    async def stop(self) -> None:
        """End episodes, sandboxes, graders and connections. Groups that would store their rows now fail: whoever asked is leaving."""
        if self._data_plane is not None:
            self._data_plane.give_up()  # where its storage is dead, waiting calls would hold every thread that the rest of this needs
        for pool in (self._train_pool, self._val_pool):
            if pool is not None:
                await pool.close()
        if self._scorer is not None:
            await self._scorer.close()
        for tool in self._tools:
            await tool.close()
        if self._is_runner_used:
            await self._program_runner.stop()
        for generator in self._generators:
            await generator.close()
        if self._sessions is not None:
            await self._sessions.aclose()
        await asyncio.to_thread(agent_server().close)


def summary_of(member: Member) -> EpisodeSummary:
    """What the controller needs to know of a member; one without an end of its own is `aborted`."""
    episode, num_retries = member.episode, member.num_retries
    if episode is None:
        return summary_without_episode(member.ticket, Outcome.ABORTED, error=None, num_retries=num_retries)
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


def summary_without_episode(ticket: EpisodeTicket, outcome: Outcome, *, error: str | None, num_retries: int = 0) -> EpisodeSummary:
    """Of an episode that never had an end of its own."""
    return EpisodeSummary(
        uid=ticket.uid,
        outcome=outcome,
        reward=None,
        accuracy=None,
        num_turns=0,
        num_sampled=0,
        counts={},
        timings=Timings(),
        temperature=ticket.temperature,
        error=error,
        num_retries=num_retries,
    )
