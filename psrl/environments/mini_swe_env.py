"""`mini_swe_env`: a project with a bug in a sandbox of its own; actions are shell commands, as mini-swe-agent's environments take them.

Invariant: one sandbox per episode, started by `reset` and stopped by `close`. What a command does, its own time-out and the limits that
it breaks are answers for the policy; a sandbox that is lost is a `SandboxError`, which says nothing about the policy.

No text of the policy runs anywhere but inside the sandbox.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from dataclasses import replace

from psrl.config.agent_yaml import AgentYaml, read_agent_yaml
from psrl.environments.base import Environment, EnvironmentParts, Info, register_environment
from psrl.errors import ConfigError, EnvironmentFault
from psrl.protocols import Sandbox, Sandboxes
from psrl.swe.agent_turn import LIMITS_EXCEEDED, REPEATED_FORMAT_ERROR, SUBMITTED, TIME_EXCEEDED, AgentAction, CommandAnswer
from psrl.swe.project import prepare_project, sandbox_spec, take_patch
from psrl.types import CommandResult, Outcome, SandboxLimits, Submission, SweProblem, Task

MERGED = ("sh", "-c", 'exec "$@" 2>&1', "sh")
"""Before the interpreter: one stream, as mini-swe-agent shows it."""

Answers = tuple[CommandAnswer, ...]


@register_environment("mini_swe_env")
class MiniSweEnvironment(Environment[SweProblem | Answers, AgentAction | str]):
    """The first observation is the problem; a step's is one answer per command, none where the turn could not be read.

    Info of a step: `commands`, `commands_failed` (another code than 0), `killed_by/<limit>`, `command_s`, `format_errors`. Of `reset`:
    `sandbox_start_s`, `prepare_s`.
    """

    def __init__(self, *, settings: AgentYaml, sandboxes: Sandboxes, limits: SandboxLimits) -> None:
        """`limits` are the run's; the YAML's `environment.timeout` replaces their wall time for commands."""
        self._settings = settings
        self._sandboxes = sandboxes
        self._limits = limits
        self._sandbox: Sandbox | None = None
        self._base: str | None = None
        self._exit_status: str | None = None
        self._text = ""
        self._num_format_errors = 0
        self._command: asyncio.Task[CommandResult] | None = None

    @classmethod
    def build(cls, parts: EnvironmentParts) -> MiniSweEnvironment:
        """With the run's sandboxes and the agent's YAML.

        Raises:
            ConfigError: The YAML is not set or wrong.
        """
        path = parts.agent_loop_config_path
        if path is None:
            fix = "set rollout.agent.agent_loop_config_path=mini_swe.yaml"
            raise ConfigError(key="rollout.agent.agent_loop_config_path", value=None, rule="mini_swe_env needs the agent's YAML", fix=fix)
        assert parts.sandboxes is not None, "a run gives its sandboxes"
        return cls(settings=read_agent_yaml(path), sandboxes=parts.sandboxes, limits=parts.sandbox_limits)

    async def reset(self, task: Task) -> tuple[SweProblem, Info]:
        """Start the sandbox and make the project ready.

        Raises:
            RowError: The row holds no problem.
            SandboxError, EnvironmentFault: The place could not be made.
        """
        problem = SweProblem.of_task(task)
        began = time.monotonic()
        self._sandbox = self._sandboxes.make(sandbox_spec(problem, self._limits))
        await self._sandbox.start()
        started = time.monotonic()
        self._base = await prepare_project(self._sandbox, problem, is_for_agent=True)
        self._cwd, self._hidden_paths = self._settings.cwd or problem.workdir, problem.hidden_paths
        return problem, {"sandbox_start_s": started - began, "prepare_s": time.monotonic() - started}

    async def step(self, action: AgentAction | str) -> tuple[Answers, float | None, bool, Info]:
        """Run the commands of a turn, one after the other, until one submits.

        Raises:
            SandboxError: The sandbox is lost.
        """
        action = AgentAction(commands=(action,)) if isinstance(action, str) else action
        if action.format_error is not None:
            self._num_format_errors += 1
            is_last = 0 < self._settings.max_consecutive_format_errors <= self._num_format_errors
            self._exit_status = REPEATED_FORMAT_ERROR if is_last else None
            return (), None, is_last, {"format_errors": 1}
        self._num_format_errors = 0
        answers: list[CommandAnswer] = []
        numbers: Counter[str] = Counter()
        for command in action.commands:
            answer, info = await self.execute(command)
            answers.append(answer)
            numbers.update(info)
            if answer.submission is not None:
                return tuple(answers), None, True, dict(numbers)
        return tuple(answers), None, False, dict(numbers)

    async def execute(self, command: object, *, cwd: str | None = None, at_most_s: float = math.inf) -> tuple[CommandAnswer, Info]:
        """Run one command; one that submits is kept for `submission`.

        Raises:
            SandboxError: The sandbox is lost.
        """
        assert self._sandbox is not None, "reset comes first"
        if not isinstance(command, str):  # a tool call's argument can be any JSON value
            error = f"a command is text, not {type(command).__name__}"
            return CommandAnswer(output="", returncode=-1, exception_info=_exception(error)), {"commands": 1, "commands_failed": 1}
        wall_s = min(float(self._settings.timeout or self._limits.wall_s), at_most_s)
        # A sandbox whose command is cancelled is lost. So the command of an episode that runs out of its time goes on to its own end,
        # which `submission` waits for: what the policy did in time is judged.
        work = self._sandbox.run(
            [*MERGED, *self._settings.interpreter, command],
            env=self._settings.env,
            cwd=cwd or self._cwd,
            limits=replace(self._limits, wall_s=wall_s),
        )
        self._command = asyncio.ensure_future(work)
        ended = await asyncio.shield(self._command)
        answer = _answer(ended, command, wall_s)
        if answer.submission is not None:
            self._exit_status, self._text = SUBMITTED, answer.submission
        info = {"commands": 1, "commands_failed": int(answer.returncode != 0), "command_s": ended.run_s}
        return answer, {**info, **({f"killed_by/{ended.killed_by.partition(':')[0]}": 1} if ended.killed_by else {})}

    async def submission(self, outcome: Outcome, *, exit_status: str | None = None) -> Submission:
        """What is left of an episode that ended with `outcome`: the patch, and what the agent handed in.

        Args:
            outcome: Says the exit status, as mini-swe-agent names it, where the agent has not said one itself.
            exit_status: What the agent said.

        Raises:
            SandboxError: The sandbox is lost, so that nobody can say what was changed.
        """
        if self._sandbox is None or self._base is None:
            raise EnvironmentFault("there is no project to take a patch from")
        if self._command is not None:
            await self._command
        status = exit_status or self._exit_status or (TIME_EXCEEDED if outcome is Outcome.TIMEOUT else LIMITS_EXCEEDED)
        patch = await take_patch(self._sandbox, self._base, self._limits, hidden_paths=self._hidden_paths)
        return Submission(exit_status=status, patch=patch, text=self._text)

    async def close(self) -> None:
        """Stop the sandbox, and with it what still runs there."""
        if self._sandbox is not None:
            await self._sandbox.stop()
        if self._command is not None:
            await asyncio.gather(self._command, return_exceptions=True)  # Nobody waits for a command of an episode that is over.


def _answer(ended: CommandResult, command: str, wall_s: float) -> CommandAnswer:
    output = (ended.stdout + ended.stderr).decode("utf-8", "replace")
    if ended.exit_code is not None:
        return CommandAnswer(output=output, returncode=ended.exit_code)
    killed_by = ended.killed_by or "unknown"
    if killed_by.startswith("signal:"):
        return CommandAnswer(output=output, returncode=128 + int(killed_by.partition(":")[2]))
    if killed_by == "wall_time":
        why = f"Command '{command}' timed out after {wall_s:g} seconds"
    else:
        why = f"Command '{command}' reached the limit of {killed_by.replace('_', ' ')}"
    return CommandAnswer(output=output, returncode=-1, exception_info=_exception(why))


def _exception(why: str) -> str:
    return f"An error occurred while executing the command: {why}"
