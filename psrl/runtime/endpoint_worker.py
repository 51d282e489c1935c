"""What plays episodes at somebody else's endpoint: the recipe's agents, sandboxes and graders, in this process.

No engine, no gateway, no Ray: agent loops with sessions are the same as in training, and the agent talks to the endpoint directly.
`psrl eval` and `psrl rollout` differ in the tasks that they give it and in what they keep.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, cast

from psrl.agent_loops.base import LoopParts, agent_loops
from psrl.agent_loops.mini_swe_server import agent_server
from psrl.agent_loops.runner import EpisodePool
from psrl.agent_loops.session import SessionAgentLoop
from psrl.config.agent_checks import plays_mini_swe
from psrl.config.endpoint import Endpoint
from psrl.config.rollout import RolloutConfig
from psrl.config.sandbox import engine_url_of
from psrl.config.tree import Config
from psrl.errors import ConfigError
from psrl.rewards.base import ScorerParts
from psrl.rewards.scorer import build_scorer
from psrl.runtime.endpoint import EndpointRunner, EndpointSessions, NotHere
from psrl.runtime.first_prompts import FirstPrompts
from psrl.runtime.group_play import Member
from psrl.sandbox import BackendSandboxes, limits_of, reap
from psrl.session_client.client import SessionClient
from psrl.telemetry.errors_log import ErrorLog
from psrl.types import EpisodeTicket, EpisodeUid, Outcome, SweProblem, Task
from psrl.types.swe import SWE_KEY

NAMED_RUNNING = 3
"""Episodes that the line of progress names, those that run longest."""


def check_tasks(config: Config, rollout: RolloutConfig, tasks: Sequence[Task]) -> None:
    """Whether all of them can be played at an endpoint.

    Raises:
        ConfigError: A row or its loop is at fault.
    """
    prompts = FirstPrompts(config, cast(Any, NotHere("renderer")), ())
    for task in tasks:
        prompts.check(task)
    for name in {task.agent_name or rollout.agent.default_agent_loop for task in tasks}:
        check_loop(name)


def check_loop(name: str) -> None:
    """An endpoint can be played at by agents that bring their own client, and by nothing else.

    Raises:
        ConfigError: The loop samples turns itself.
    """
    loop = agent_loops.resolve(name)
    if not (isinstance(loop, type) and issubclass(loop, SessionAgentLoop)):
        rule = f"an endpoint's turns have no token ids, which the loop {name} needs; it serves agents with sessions, such as mini_swe_agent"
        raise ConfigError(key="--model", value=name, rule=rule, fix="name a model folder, or a recipe whose agent has sessions")


def name_of(task: Task) -> str:
    """What people call it: the problem's name where it has one."""
    return SweProblem.of_task(task).instance_id if SWE_KEY in task.extra_info else task.uid


class EndpointWorker:
    """Plays episodes while it is entered; sandboxes and graders are gone afterwards, however it ends."""

    def __init__(self, config: Config, rollout: RolloutConfig, endpoint: Endpoint, errors: ErrorLog) -> None:
        """Nothing is started. `errors` is told of failures that are played again; how an episode ended is the caller's to write down."""
        self._config, self._rollout, self._endpoint, self._errors = config, rollout, endpoint, errors
        self._names: dict[EpisodeUid, str] = {}
        """Of tasks whose episodes wait or are played."""
        self._stack = AsyncExitStack()
        self._pool: EpisodePool | None = None

    async def __aenter__(self) -> EndpointWorker:
        config, rollout = self._config, self._rollout
        await asyncio.to_thread(reap, engine_url=engine_url_of(config.sandbox))
        sandboxes = BackendSandboxes(config.sandbox)
        scorer_parts = ScorerParts(
            reward=config.reward,
            custom=config.custom_reward_function,
            sandboxes=sandboxes,
            allow_network=config.sandbox.allow_network,
        )
        scorer = build_scorer(scorer_parts)
        max_concurrent = rollout.agent.max_concurrent_episodes
        parts = LoopParts(
            renderer=cast(Any, NotHere("renderer")),
            generator=cast(Any, NotHere("generator")),
            sandboxes=sandboxes,
            sandbox_limits=replace(limits_of(config.sandbox), allow_network=config.sandbox.allow_network),
            rollout=rollout,
            sessions=cast(SessionClient, EndpointSessions(self._endpoint)),
        )
        runner = EndpointRunner(parts, scorer, score_timeout_s=config.reward.score_timeout_s(max_concurrent=max_concurrent))
        self._pool = EpisodePool(runner, max_concurrent=max_concurrent)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, agent_server().close)
            stack.push_async_callback(scorer.close)
            stack.push_async_callback(self._pool.close)
            if plays_mini_swe(rollout):
                await sandboxes.preflight()
            await scorer.self_test()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._stack.aclose()

    async def play(self, task: Task, ticket: EpisodeTicket) -> Member:
        """One episode; played again, at most `psrl.max_episode_retries` times, because something else than the model failed.

        Waits for: a free place, then the episode. Unblocked by: the deadlines of the episodes before, and its own.
        """
        assert self._pool is not None, "it is entered first"
        self._names[ticket.uid] = name_of(task)
        num_retries = 0
        try:
            while True:
                episode = await self._pool.run(task, ticket)
                is_fault = episode.result.outcome is Outcome.INFRA_ERROR
                if not is_fault or num_retries == self._config.psrl.max_episode_retries:
                    return Member(ticket=ticket, episode=episode, num_retries=num_retries)
                unit = f"{self._names[ticket.uid]} {ticket.uid}"
                self._errors.record_text(episode.result.outcome.value, episode.result.error or "", is_retryable=True, unit=unit, step=0)
                num_retries += 1
        finally:
            del self._names[ticket.uid]

    def running(self) -> str:
        """`now: astropy__astropy-1 95 s, astropy__astropy-2 3 s and 4 more`; empty where none is played."""
        assert self._pool is not None, "it is entered first"
        seconds_of = self._pool.seconds_in_flight
        running = sorted(((seconds, self._names[uid]) for uid, seconds in seconds_of.items() if uid in self._names), reverse=True)
        named = ", ".join(f"{name} {seconds:.0f} s" for seconds, name in running[:NAMED_RUNNING])
        rest = f" and {len(running) - NAMED_RUNNING} more" if len(running) > NAMED_RUNNING else ""
        return f"now: {named}{rest}" if running else ""


async def tell_every_second(tell: Callable[[], None]) -> None:
    """Waits for: a second at a time. Unblocked by: whoever cancels it."""
    while True:
        await asyncio.sleep(1.0)
        tell()


async def end_agents(stop: asyncio.Event) -> None:
    """A process of agents that is not warm yet would hold the end up for as long as it takes to be."""
    await stop.wait()
    agent_server().stop()
