"""An episode while it is played: what is kept of it, so that any end, also a failure half-way, has its record.

Invariant: `result` can be called at any time and gives what the episode has so far.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any, Protocol, TypeVar, runtime_checkable

from psrl.agent_loops.base import Failure
from psrl.agent_loops.deadline import OutOfTimeError, within
from psrl.agent_loops.limits import Limits
from psrl.config.rollout import RolloutConfig
from psrl.engine_client.whole_turn import whole_turn
from psrl.errors import EngineError, EnvironmentFault, SandboxError
from psrl.protocols import AgentData, Environment, Generator, Info
from psrl.telemetry.waits import counting_waits
from psrl.types import (
    EpisodeTicket,
    GenerateRequest,
    Generation,
    LoopResult,
    Outcome,
    SamplingParams,
    Submission,
    Task,
    Timings,
    turn_priority,
    turn_seed,
)

T = TypeVar("T")


class TurnSource(Protocol):
    """Where the turns of one episode are sampled."""

    async def sample(self, data: AgentData[Any, Any], *, max_tokens: int) -> Generation:
        """The whole turn that follows what `data` holds; never one that an engine gave back unfinished.

        Raises:
            EngineError, GatewayError: There is none to be had.
        """


@runtime_checkable
class HandsIn(Protocol):
    """An environment whose episodes leave something for scorers."""

    async def submission(self, outcome: Outcome) -> Submission:
        """What is there at the end of an episode that ended with `outcome`; called before `close`.

        Raises:
            SandboxError: It is lost.
        """


class EngineTurns(TurnSource):
    """Native turns, ids in and ids out: request `<episode>-<turn>`, seed `turn_seed`, the episode as affinity key."""

    def __init__(self, generator: Generator, rollout: RolloutConfig, ticket: EpisodeTicket) -> None:
        self._generator, self._rollout, self._ticket = generator, rollout, ticket

    async def sample(self, data: AgentData[Any, Any], *, max_tokens: int) -> Generation:
        """See `TurnSource`."""
        turn = data.trajectory.num_turns
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature_of(self._rollout, self._ticket),
            top_p=self._rollout.top_p,
            top_k=self._rollout.top_k,
            seed=turn_seed(self._ticket.seed, turn),
            stop_token_ids=data.stop_token_ids(),
        )
        request = GenerateRequest(
            request_id=f"{self._ticket.uid}-{turn}",
            token_ids=data.context_ids(),
            sampling=sampling,
            session=self._ticket.uid,
            instance=self._ticket.instance,
            priority=turn_priority(self._ticket.admitted_version, is_validation=self._ticket.is_validation),
        )
        return await whole_turn(self._generator, request)


class PlayedEpisode:
    """One episode of an environment: asks it and the policy, within limits, and keeps count of both."""

    def __init__(
        self,
        task: Task,
        ticket: EpisodeTicket,
        *,
        environment: Environment[Any, Any],
        agent_data: AgentData[Any, Any],
        turns: TurnSource,
        temperature: float,
        limits: Limits,
    ) -> None:
        """The clock starts here."""
        self.task = task
        self.agent_data = agent_data
        self.temperature = temperature
        self._ticket = ticket
        self._environment = environment
        self._turns = turns
        self._limits = limits
        self._prompt_tokens = 0
        self._step_rewards: list[float | None] = []
        self._counts: Counter[str] = Counter()
        self._started = time.monotonic()
        self._generation_s = 0.0
        self._tools_s = 0.0
        self._waited_s = 0.0
        """Of `_tools_s`, those in which steps waited for places that others had."""

    async def reset(self) -> tuple[Any, Info]:
        """Begin in the environment. A reset that takes too long is a fault, not a timeout: the policy has done nothing yet."""
        with self._timing_tools():
            try:
                answer = await self._bounded(self._environment.reset(self.task), "Environment.reset")
            except OutOfTimeError as error:
                raise EnvironmentFault(str(error)) from error
        observation, info = _unpacked(answer, 2, "reset", "(observation, info)")
        self._count(info)
        return observation, info

    def next_turn(self) -> int | Outcome:
        """How many tokens the next turn may have, or how the episode ends instead.

        Raises:
            EnvironmentFault: The first prompt is too long.
            OutOfTimeError, EngineError, SandboxError: The episode's seconds have run out.
        """
        num_turns = self.agent_data.trajectory.num_turns
        num_context = len(self.agent_data.context_ids())
        if num_turns == 0:
            self._limits.check_prompt(num_context)
            self._prompt_tokens = num_context
        allowed = self._limits.before_generation(
            num_turns=num_turns, num_response_tokens=num_context - self._prompt_tokens, elapsed_s=time.monotonic() - self._started
        )
        if allowed is Outcome.TIMEOUT:
            raise self.out_of_time()
        return allowed

    def out_of_time(self) -> OutOfTimeError | EngineError | SandboxError:
        """The error of an episode whose seconds have run out: who used most of them answers for it.

        The policy cannot make the engines slow (its tokens are bounded by `response_length`) nor shorten the queue for a sandbox, only
        its own steps. So where most of the time went there it is an error that is never judged: an engine that hangs, or a machine with
        too few sandboxes, must not look like bad episodes.
        """
        text = (
            f"episode {self._ticket.uid} took longer than {self._limits.episode_timeout_s:g} s: {self._generation_s:.2f} s waiting for "
            f"engines, {self._waited_s:.2f} s for a free sandbox, {self._tools_s - self._waited_s:.2f} s in the environment"
        )
        if self._generation_s + self._waited_s <= self._tools_s - self._waited_s:
            return OutOfTimeError(text)
        return EngineError(text) if self._generation_s > self._waited_s else SandboxError(text)

    async def generate(self, max_tokens: int) -> Generation:
        """Sample the next turn.

        Raises:
            EngineError, GatewayError: Nobody answered.
        """
        began = time.monotonic()
        try:
            generation = await self._turns.sample(self.agent_data, max_tokens=max_tokens)
        finally:
            self._generation_s += time.monotonic() - began
        if generation.num_resumes:
            self._counts["resumed_turns"] += generation.num_resumes
        return generation

    async def step(self, action: Any) -> tuple[Any, bool, Info]:
        """Apply the action; the reward is kept here.

        Raises:
            OutOfTimeError: The step took longer than `step_timeout_s`.
            SandboxError: So it did, and waited for a free sandbox most of that time.
        """
        with self._timing_tools(), counting_waits() as waits:
            try:
                answer = await self._bounded(self._environment.step(action), "Environment.step")
            except OutOfTimeError as error:
                if waits.seconds > self._limits.step_timeout_s / 2:
                    raise SandboxError(f"{error}, {waits.seconds:.2f} s of it waiting for a free sandbox") from error
                raise
            finally:
                self._waited_s += waits.seconds
        observation, reward, done, info = _unpacked(answer, 4, "step", "(observation, reward, done, info)")
        if reward is not None and not (isinstance(reward, Real) and math.isfinite(reward)):
            raise EnvironmentFault(f"Environment.step returned the reward {reward!r:.80}; a reward is a finite number or None")
        self._step_rewards.append(None if reward is None else float(reward))
        self._count(info)
        return observation, bool(done), info

    async def submission(self, outcome: Outcome) -> Submission | None:
        """What the environment has for scorers; None where it has nothing, or the outcome judges nobody.

        Raises:
            OutOfTimeError, SandboxError: It is lost.
        """
        if not outcome.judges_policy or not isinstance(self._environment, HandsIn):
            return None
        what = f"{type(self._environment).__name__}: Environment.submission"
        # Twice: a step that was in flight when the episode's time ran out comes to its own end first.
        return await within(self._environment.submission(outcome), timeout_s=2 * self._limits.step_timeout_s, what=what)

    async def close(self) -> None:
        """Close the environment.

        Raises:
            OutOfTimeError: It does not end.
        """
        await self._bounded(self._environment.close(), "Environment.close")

    def result(
        self, end: Outcome | Failure, *, submission: Submission | Failure | None = None, close_failure: Failure | None = None
    ) -> LoopResult:
        """The record. A submission that is lost leaves nothing to judge; a failed close is counted and told, but changes no end."""
        trajectory = self.agent_data.trajectory
        outcome = end.outcome if isinstance(end, Failure) else end
        failures = [failure for failure in (end, submission, close_failure) if isinstance(failure, Failure)]
        outcome = Outcome.INFRA_ERROR if isinstance(submission, Failure) else outcome
        errors = [failure.error for failure in failures]
        if outcome.judges_policy and trajectory.num_sampled == 0:
            errors.append(f"ended as {outcome} before the policy sampled a token")
            outcome = Outcome.ABORTED if isinstance(end, Failure) and end.is_truncation else Outcome.INFRA_ERROR
        counts = Counter(self._counts)
        counts.update(self.agent_data.counts())
        counts["turns"] = trajectory.num_turns
        counts.update(f"errors/{failure.name}" for failure in failures)
        return LoopResult(
            outcome=outcome,
            trajectories=(trajectory,) if trajectory.num_sampled else (),
            messages=tuple(self.agent_data.messages),
            turn_texts=tuple(self.agent_data.turn_texts),
            step_rewards=tuple(self._step_rewards),
            counts={name: float(value) for name, value in counts.items()},
            timings=Timings(total_s=time.monotonic() - self._started, generation_s=self._generation_s, tools_s=self._tools_s),
            submission=None if isinstance(submission, Failure) else submission,
            error="; ".join(errors) or None,
        )

    async def _bounded(self, work: Coroutine[Any, Any, T], what: str) -> T:
        return await within(work, timeout_s=self._limits.step_timeout_s, what=f"{type(self._environment).__name__}: {what}")

    @contextmanager
    def _timing_tools(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._tools_s += time.monotonic() - began

    def _count(self, info: Mapping[str, Any]) -> None:
        numbers = {name: float(value) for name, value in info.items() if isinstance(value, Real) and math.isfinite(value)}
        self._counts.update({f"env/{name}": value for name, value in numbers.items()})


def temperature_of(rollout: RolloutConfig, ticket: EpisodeTicket) -> float:
    """Of every turn of an episode."""
    return rollout.temperature if ticket.temperature is None else ticket.temperature


def _unpacked(answer: Any, length: int, method: str, shape: str) -> tuple[Any, ...]:
    if not isinstance(answer, tuple) or len(answer) != length:
        raise EnvironmentFault(f"Environment.{method} must return {shape}, got {answer!r:.80}")
    if not isinstance(answer[-1], Mapping):
        raise EnvironmentFault(f"Environment.{method}: info must be a dict, got {answer[-1]!r:.80}")
    return answer
