"""What a turn of mini-swe-agent's conversation says, and how its commands are answered; pure, as its own model classes do it.

The black-box agent does this in its own process. `mini_swe_agent_data` does it natively, and a test holds both equal token for token.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jinja2

from psrl.config.agent_yaml import AgentYaml
from psrl.types import Message, ParsedTurn, Role, SweProblem, ToolCallError, ToolSchema

SUBMIT_LINE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
SUBMITTED, LIMITS_EXCEEDED, TIME_EXCEEDED = "Submitted", "LimitsExceeded", "TimeExceeded"
REPEATED_FORMAT_ERROR = "RepeatedFormatError"
"""Exit statuses, as mini-swe-agent names them."""
BASH_TOOL = ToolSchema(
    name="bash",
    description="Execute a bash command",
    parameters={
        "type": "object",
        "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
        "required": ["command"],
    },
)
"""The tool of mini-swe-agent's model class `litellm`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandAnswer:
    """What the agent is told of one command, in mini-swe-agent's words."""

    output: str
    """stdout and stderr in one."""
    returncode: int
    """-1 where the command did not end by itself; then `exception_info` says why."""
    exception_info: str = ""

    @property
    def submission(self) -> str | None:
        """What the command handed in; None where it does not end the episode.

        The rule of mini-swe-agent's environments: the first line that is not white space says so, and the command succeeded.
        """
        lines = self.output.lstrip().splitlines(keepends=True)
        is_submitted = bool(lines) and lines[0].strip() == SUBMIT_LINE and self.returncode == 0
        return "".join(lines[1:]) if is_submitted else None


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentAction:
    """What a turn asks for: commands, or what the policy is told about a turn that cannot be read."""

    commands: tuple[Any, ...] = ()
    """Texts; from tool calls any JSON value, which the environment answers."""
    call_ids: tuple[str, ...] = ()
    """Of the tool calls, in the same order; empty where commands stand in text."""
    format_error: str | None = None


def read_turn(parsed: ParsedTurn, settings: AgentYaml, *, finish_reason: str) -> AgentAction:
    """The action of a turn."""
    if settings.is_textbased:
        return _text_action(parsed.content, settings, finish_reason=finish_reason)
    return _call_action(parsed, settings, finish_reason=finish_reason)


def prompt_variables(
    settings: AgentYaml, problem: SweProblem, *, step_limit: int, wall_s: float, system: platform.uname_result
) -> dict[str, Any]:
    """What the templates of an episode know from its start to its end; the number of calls and the seconds grow beside them."""
    return {
        "system_template": settings.system_template,
        "instance_template": settings.instance_template,
        "step_limit": step_limit,
        "wall_time_limit_seconds": settings.wall_time_limit_seconds,
        "max_consecutive_format_errors": settings.max_consecutive_format_errors,
        **settings.environment_variables(workdir=problem.workdir, wall_s=wall_s),
        "system": system.system,
        "release": system.release,
        "version": system.version,
        "machine": system.machine,
        "task": problem.statement,
        "n_model_calls": 0,
        "elapsed_seconds": 0,
    }


def first_messages(settings: AgentYaml, variables: Mapping[str, Any]) -> tuple[Message, Message]:
    """The system's and the task's message."""
    return (
        Message(role=Role.SYSTEM, content=render(settings.system_template, variables)),
        Message(role=Role.USER, content=render(settings.instance_template, variables)),
    )


def tools_of(settings: AgentYaml) -> tuple[ToolSchema, ...]:
    """What the first prompt offers."""
    return () if settings.is_textbased else (BASH_TOOL,)


def render(template: str, variables: Mapping[str, Any]) -> str:
    """A template of the YAML; what a command printed is only ever a variable."""
    text: str = jinja2.Template(template, undefined=jinja2.StrictUndefined).render(**variables)
    return text


def _text_action(content: str, settings: AgentYaml, *, finish_reason: str) -> AgentAction:
    actions = [action.strip() for action in re.findall(settings.action_regex, content, re.DOTALL)]
    if len(actions) == 1:
        return AgentAction(commands=tuple(actions))
    variables = {"actions": actions, "error": f"Expected exactly 1 action, found {len(actions)}.", "finish_reason": finish_reason}
    return AgentAction(format_error=render(settings.format_error_template, variables))


def _call_action(parsed: ParsedTurn, settings: AgentYaml, *, finish_reason: str) -> AgentAction:
    error = ""
    commands, call_ids = [], []
    for call in parsed.calls:
        if isinstance(call, ToolCallError):
            error = f"Error parsing tool call arguments: {call.message}."
        else:
            error = "" if call.name == BASH_TOOL.name else f"Unknown tool '{call.name}'."
            error += "" if "command" in call.arguments else "Missing 'command' argument in bash tool call."
            commands.append(call.arguments.get("command"))
            call_ids.append(call.id)
        if error:
            break
    if not parsed.calls:
        error = "No tool calls found in the response. Every response MUST include at least one tool call."
    if not error:
        return AgentAction(commands=tuple(commands), call_ids=tuple(call_ids))
    variables = {"actions": [], "error": error.strip(), "has_tool_calls": bool(parsed.calls), "finish_reason": finish_reason}
    return AgentAction(format_error=render(settings.format_error_template, variables))
