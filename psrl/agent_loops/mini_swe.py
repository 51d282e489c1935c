"""`mini_swe_agent`: mini-swe-agent, unmodified and in a process of its own, on the episode's session; its commands run in our sandbox.

How an episode ends; the first line that holds, after those of `session.py` that speak of the session's record:

| what happened | outcome | submission |
|---|---|---|
| the sandbox could not be made, or was lost, or the project's set-up failed | `infra_error` | none |
| the agent's process was killed or vanished, which the policy cannot bring about | `infra_error` | none |
| a limit of the session was reached | `max_turns`, `max_tokens` | the patch so far |
| the agent's own `LimitsExceeded`: its steps are `multi_turn.max_turns` | `max_turns` | the patch so far |
| the agent's own `TimeExceeded`, `episode_timeout_s`, or a truncation | `timeout` | the patch so far |
| an exception inside mini-swe-agent | `agent_error` | the patch so far |
| `RepeatedFormatError`: so many turns in a row without a command | `finished` | the patch so far |
| `Submitted` | `finished` | patch and text |

The patch is what the sandbox's git says, whatever the agent hands in as text. Making the sandbox and taking the patch have
`step_timeout_s` each and are not part of `episode_timeout_s`.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import replace
from typing import Any, ClassVar
from urllib.parse import urlsplit

from psrl.agent_loops.base import Failure, LoopParts, failure_or, register_agent_loop
from psrl.agent_loops.deadline import GRACE_S, OutOfTimeError, within
from psrl.agent_loops.mini_swe_server import EpisodeProcess, agent_server
from psrl.agent_loops.multi_turn import environment_parts
from psrl.agent_loops.session import AgentEnd, SessionAgentLoop
from psrl.config.agent_yaml import AgentYaml, read_agent_yaml
from psrl.environments.mini_swe_env import MiniSweEnvironment
from psrl.errors import ConfigError, EnvironmentFault, ProcessDiedError
from psrl.protocols import Info
from psrl.swe.agent_turn import LIMITS_EXCEEDED, REPEATED_FORMAT_ERROR, SUBMITTED, TIME_EXCEEDED
from psrl.types import Message, Outcome, Role, SessionAddress, SweProblem, Task, ToolCall

CLOSE_TIMEOUT_S = 20.0
BACKSTOP_S = 15.0
"""Of `run_timeout_s` beyond its parts."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
FAR_RETRIES = 2
"""Of a request to another machine; the gateway on this one tries a turn again itself."""
OUTCOMES = {
    SUBMITTED: Outcome.FINISHED,
    REPEATED_FORMAT_ERROR: Outcome.FINISHED,
    LIMITS_EXCEEDED: Outcome.MAX_TURNS,
    TIME_EXCEEDED: Outcome.TIMEOUT,
}
"""Of the exit statuses of mini-swe-agent that are no error."""


class Conversation:
    """One run of the agent's process: what it asks for is done in the environment, until it ends."""

    def __init__(self, environment: MiniSweEnvironment) -> None:
        """Nothing runs yet."""
        self._environment = environment
        self.counts: defaultdict[str, float] = defaultdict(float)
        self.exit_status: str | None = None
        """What the agent says."""
        self.messages: tuple[Message, ...] = ()
        """What it says was said; empty where it had no time to."""

    def count(self, info: Info) -> None:
        """Numbers of the environment."""
        for name, value in info.items():
            self.counts[f"env/{name}"] += float(value)

    async def hold(self, start: dict[str, Any], *, timeout_s: float) -> tuple[Outcome, str | None]:
        """Let the agent play; the outcome, and the error where it is one. No command is given more time than the episode has left.

        Raises:
            ProcessDiedError: The process ended without a word.
            SandboxError: The sandbox is lost.
        """
        began = time.monotonic()
        process = EpisodeProcess(agent_server())
        async with process:
            self.counts["agent/process_start_s"] += time.monotonic() - began
            ends_at = time.monotonic() + timeout_s
            await process.send(start)
            while (message := await process.receive()) is not None:
                if "end" in message:
                    return self._outcome_of(message["end"])
                left_s = max(0.1, ends_at - time.monotonic())
                answer, info = await self._environment.execute(message["execute"], cwd=message["cwd"], at_most_s=left_s)
                self.count(info)
                await process.send({"output": answer.output, "returncode": answer.returncode, "exception_info": answer.exception_info})
        raise ProcessDiedError(f"the agent's process ended with {process.exit_code} and no word; its last output: {process.output_tail}")

    def _outcome_of(self, end: dict[str, Any]) -> tuple[Outcome, str | None]:
        self.exit_status = status = str(end["exit_status"])
        self.counts["agent/calls"] = end["num_calls"]
        self.messages = tuple(_message_of(raw) for raw in end["messages"])
        if end["error"] is None and status in OUTCOMES:
            return OUTCOMES[status], None
        self.counts[f"errors/{status}"] += 1
        return Outcome.AGENT_ERROR, f"{end['error'] or status}"[:4000]


@register_agent_loop("mini_swe_agent")
class MiniSWEAgentLoopV1(SessionAgentLoop):
    """Settings are mini-swe-agent's own YAML, `rollout.agent.agent_loop_config_path`; rows hold a `SweProblem`.

    Counts: `env/...` of `mini_swe_env`, `env/patch_s`, `agent/process_start_s`, `agent/calls`.
    """

    takes_truncation: ClassVar[bool] = True
    """The patch so far is taken first."""

    def __init__(self, parts: LoopParts) -> None:
        """Begins to warm the worker's process of mini-swe-agent.

        Raises:
            ConfigError: The run has no gateway, or the YAML is not set or wrong.
        """
        super().__init__(parts)
        self._settings = settings_of(parts)
        agent_server().start()

    @property
    def run_timeout_s(self) -> float:
        """A backstop: the parts of `run_agent` (sandbox, agent, patch, end of the sandbox) have all ended before it, at the latest."""
        limits = self._limits
        parts_s = (
            limits.step_timeout_s + GRACE_S,
            limits.episode_timeout_s + CLOSE_TIMEOUT_S,
            limits.step_timeout_s + GRACE_S,
            CLOSE_TIMEOUT_S + GRACE_S,
        )
        return sum(parts_s) + BACKSTOP_S

    async def run_agent(self, task: Task, address: SessionAddress) -> AgentEnd:
        """Sandbox, agent, patch; the sandbox is stopped whatever happens."""
        environment = MiniSweEnvironment.build(environment_parts(self._parts))
        conversation = Conversation(environment)
        try:
            end = await self._play_in(environment, conversation, task, address)
        finally:
            closed = await failure_or(within(environment.close(), timeout_s=CLOSE_TIMEOUT_S, what="stopping the sandbox"))
        return end if closed is None else with_failure(end, closed)

    async def _play_in(self, environment: MiniSweEnvironment, conversation: Conversation, task: Task, address: SessionAddress) -> AgentEnd:
        made = await failure_or(self._made_ready(environment, task, conversation))
        if isinstance(made, Failure):
            return AgentEnd(outcome=Outcome.INFRA_ERROR, error=made.error, counts=_counts(conversation, made))
        timeout_s = self._limits.episode_timeout_s
        work = conversation.hold(self._start_of(made, address), timeout_s=timeout_s)
        truncation = self.truncation_of(address)
        holding = within(work, timeout_s=timeout_s, what="mini-swe-agent", grace_s=CLOSE_TIMEOUT_S, truncation=truncation)
        held = await failure_or(holding)
        is_truncation = isinstance(held, Failure) and held.is_truncation
        outcome, error = (held.outcome, held.error) if isinstance(held, Failure) else held
        if isinstance(held, Failure) and outcome is not Outcome.TIMEOUT:
            return AgentEnd(outcome=outcome, error=error, counts=_counts(conversation, held))
        began = time.monotonic()
        taking = environment.submission(outcome, exit_status=conversation.exit_status)
        left = await failure_or(within(taking, timeout_s=self._limits.step_timeout_s, what="taking the patch"))
        conversation.count({"patch_s": time.monotonic() - began})
        if isinstance(left, Failure):
            errors = "; ".join(filter(None, (error, left.error)))
            return AgentEnd(outcome=Outcome.INFRA_ERROR, error=errors, counts=_counts(conversation, left))
        return AgentEnd(
            outcome=outcome,
            error=error,
            counts=_counts(conversation, held if isinstance(held, Failure) else None),
            submission=left,
            messages=conversation.messages,
            is_truncation=is_truncation,
        )

    async def _made_ready(self, environment: MiniSweEnvironment, task: Task, conversation: Conversation) -> SweProblem:
        try:
            problem, info = await within(environment.reset(task), timeout_s=self._limits.step_timeout_s, what="making the sandbox ready")
        except OutOfTimeError as error:
            raise EnvironmentFault(str(error)) from error  # The policy has done nothing yet.
        conversation.count(info)
        return problem

    def _start_of(self, problem: SweProblem, address: SessionAddress) -> dict[str, Any]:
        """The first frame of the process: everything that mini-swe-agent's classes are made from."""
        settings = self._settings
        model: dict[str, Any] = {
            "model_name": f"openai/{address.model}",
            "cost_tracking": "ignore_errors",
            "observation_template": settings.observation_template,
            "format_error_template": settings.format_error_template,
            "model_kwargs": {
                **settings.model_kwargs,
                "api_base": address.base_url,
                "api_key": address.api_key,
                "timeout": self._limits.episode_timeout_s,
                "max_retries": 0 if urlsplit(address.url).hostname in LOOPBACK else FAR_RETRIES,
            },
        }
        if settings.is_textbased:
            model["action_regex"] = settings.action_regex
        return {
            "task": problem.statement,
            "model_class": settings.model_class,
            "model": model,
            "environment": settings.environment_variables(workdir=problem.workdir, wall_s=self._parts.sandbox_limits.wall_s),
            "agent": {
                "system_template": settings.system_template,
                "instance_template": settings.instance_template,
                "step_limit": self._limits.max_turns,
                "cost_limit": 0.0,
                "wall_time_limit_seconds": settings.wall_time_limit_seconds,
                "max_consecutive_format_errors": settings.max_consecutive_format_errors,
            },
        }


def settings_of(parts: LoopParts) -> AgentYaml:
    """The agent's YAML of a run.

    Raises:
        ConfigError: It is not set, or wrong.
    """
    path = parts.rollout.agent.agent_loop_config_path
    if path is None:
        key = "rollout.agent.agent_loop_config_path"
        fix = f"set {key}=mini_swe.yaml, with the sections agent, environment and model"
        raise ConfigError(key=key, value=None, rule="mini_swe_agent needs mini-swe-agent's YAML", fix=fix)
    return read_agent_yaml(path)


def _message_of(raw: dict[str, Any]) -> Message:
    """Of the agent's own conversation; calls whose arguments are no JSON object are shown as they were written."""
    calls, content = [], str(raw["content"]) if "content" in raw else ""
    for call in raw.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        shown = parsed if isinstance(parsed, dict) else {"arguments": arguments}
        calls.append(ToolCall(id=str(call["id"]), name=str(call["function"]["name"]), arguments=shown))
    return Message(role=Role(raw["role"]), content=content, tool_calls=tuple(calls), tool_call_id=raw.get("tool_call_id"))


def with_failure(end: AgentEnd, closed: Failure) -> AgentEnd:
    """An end whose sandbox did not stop: told and counted, no other end."""
    error = "; ".join(filter(None, (end.error, closed.error)))
    return replace(end, error=error, counts={**end.counts, f"errors/{closed.name}": 1.0})


def _counts(conversation: Conversation, failure: Failure | None) -> dict[str, float]:
    return {**conversation.counts, **({f"errors/{failure.name}": 1.0} if failure else {})}
