"""The YAML of a black-box agent, `rollout.agent.agent_loop_config_path`: mini-swe-agent's own sections, and `task_kind`.

Read and checked without mini-swe-agent, so that a wrong file is refused in milliseconds. What psrl itself decides (the model, its
address and its sampling, where commands run, the price of tokens) is refused in the file, so that no line of it is dead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import yaml

from psrl.errors import ConfigError

KEY = "rollout.agent.agent_loop_config_path"
DEFAULT_OBSERVATION_TEMPLATE = (
    "{% if output.exception_info %}<exception>{{output.exception_info}}</exception>\n{% endif %}"
    "<returncode>{{output.returncode}}</returncode>\n<output>\n{{output.output}}</output>"
)
"""mini-swe-agent's; a test holds these defaults equal to its own."""
DEFAULT_ACTION_REGEX = r"```mswea_bash_command\s*\n(.*?)\n```"
DEFAULT_FORMAT_ERROR = {
    "litellm": "{{ error }}",
    "litellm_textbased": "Please always provide EXACTLY ONE action in triple backticks, found {{actions|length}} actions.",
}
SECTIONS = ("task_kind", "agent", "environment", "model")
RUN_VARIABLES = ("task", "n_model_calls", "elapsed_seconds", "system", "release", "version", "machine")
AGENT_VARIABLES = ("system_template", "instance_template", "step_limit", "wall_time_limit_seconds", "max_consecutive_format_errors")
ENVIRONMENT_VARIABLES = ("cwd", "timeout", "env", "interpreter")
PROMPT_VARIABLES = frozenset((*RUN_VARIABLES, *AGENT_VARIABLES, *ENVIRONMENT_VARIABLES))
OBSERVATION_VARIABLES = PROMPT_VARIABLES | {"output"}
FORMAT_ERROR_VARIABLES = frozenset({"actions", "error", "finish_reason", "has_tool_calls"})
MODEL_KWARGS = ("drop_params", "parallel_tool_calls")
"""Whose effect ends in the agent; every other argument is the run's or its sampling's."""
NOT_OURS = {
    "agent.cost_limit": "tokens have no price here; multi_turn.max_turns and response_length bound an episode",
    "agent.output_path": "the agent writes no files; the run folder has every episode",
    "environment.environment_class": "commands run in the run's sandbox",
    "environment.image": "the image is the row's",
    "model.model_name": "the model is the run's policy",
    "model.litellm_model_registry": "tokens have no price here",
    "model.cost_tracking": "tokens have no price here",
}
"""Keys of mini-swe-agent that psrl decides, with the reason."""


@dataclass(frozen=True, kw_only=True)
class AgentYaml:
    """A checked file. Fields that mini-swe-agent has keep its names and meaning."""

    path: str
    task_kind: str
    """Rows of the run must have the same `task_kind`."""
    system_template: str
    instance_template: str
    step_limit: int = 0
    """0, or what `multi_turn.max_turns` says."""
    wall_time_limit_seconds: int = 0
    max_consecutive_format_errors: int = 3
    cwd: str | None = None
    """None: the row's `workdir`."""
    timeout: int | None = None
    """Seconds of one command; None: `sandbox.wall_s`."""
    env: Mapping[str, str] = field(default_factory=dict)
    interpreter: tuple[str, ...] = ("bash", "-c")
    model_class: str = "litellm"
    """`litellm` (the tool `bash`) or `litellm_textbased` (a block of text that `action_regex` finds)."""
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    action_regex: str = DEFAULT_ACTION_REGEX
    observation_template: str = DEFAULT_OBSERVATION_TEMPLATE
    format_error_template: str = ""

    @property
    def is_textbased(self) -> bool:
        """Whether commands stand in the text of a turn, and not in tool calls."""
        return self.model_class == "litellm_textbased"

    def environment_variables(self, *, workdir: str, wall_s: float) -> dict[str, Any]:
        """What templates know of the environment section, the defaults filled in."""
        return {
            "cwd": self.cwd or workdir,
            "timeout": self.timeout or wall_s,
            "env": dict(self.env),
            "interpreter": list(self.interpreter),
        }


TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "agent.system_template": ((str,), "text"),
    "agent.instance_template": ((str,), "text"),
    "agent.step_limit": ((int,), "a whole number, 0 or more"),
    "agent.wall_time_limit_seconds": ((int,), "a whole number, 0 or more"),
    "agent.max_consecutive_format_errors": ((int,), "a whole number, 0 or more"),
    "environment.cwd": ((str,), "an absolute folder"),
    "environment.timeout": ((int,), "a whole number of seconds, 1 or more"),
    "environment.env": ((dict,), "a mapping of texts"),
    "environment.interpreter": ((list,), "a list of texts such as [bash, -c]"),
    "model.model_class": ((str,), "litellm or litellm_textbased"),
    "model.model_kwargs": ((dict,), f"a mapping of {' and '.join(MODEL_KWARGS)}"),
    "model.action_regex": ((str,), "a regular expression with one group"),
    "model.observation_template": ((str,), "text"),
    "model.format_error_template": ((str,), "text"),
}


def read_agent_yaml(path: str, *, key: str = KEY) -> AgentYaml:
    """The file at `path`, checked.

    Raises:
        ConfigError: It cannot be read, or a line of it is wrong; names the setting `key`, and the key inside the file.
    """
    try:
        return _read(path, Path(path).stat().st_mtime_ns)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        rule = f"cannot be read as YAML ({' '.join(str(error).split()):.200})"
        fix = "name a file with mini-swe-agent's sections agent, environment, model"
        raise ConfigError(key=key, value=path, rule=rule, fix=fix) from error


@lru_cache(maxsize=64)
def _read(path: str, _changed_ns: int) -> AgentYaml:
    content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise _refusal(path, "", content, "must be a mapping", f"write the sections {', '.join(SECTIONS)}")
    for name in content:
        if name not in SECTIONS:
            raise _refusal(path, str(name), content[name], "is no section", f"known are {', '.join(SECTIONS)}")
    kind = content.get("task_kind")
    if not isinstance(kind, str) or not kind:
        raise _refusal(path, "task_kind", kind, "must say for which rows the file was written", "write task_kind: swe")
    given: dict[str, Any] = {}
    for section in SECTIONS[1:]:
        values = content.get(section) or {}
        if not isinstance(values, dict):
            raise _refusal(path, section, values, "must be a mapping", f"write the keys of mini-swe-agent's {section} section")
        for name, value in values.items():
            given[str(name)] = _checked(path, f"{section}.{name}", value)
    for name in ("system_template", "instance_template"):
        if name not in given:
            raise _refusal(path, f"agent.{name}", None, "is missing", f"write agent.{name}, the text of the first messages")
    model_class = given.get("model_class") or "litellm"
    given.setdefault("format_error_template", DEFAULT_FORMAT_ERROR[model_class])
    if "action_regex" in given and model_class != "litellm_textbased":
        fix = "set model.model_class: litellm_textbased, or leave it out"
        raise _refusal(path, "model.action_regex", given["action_regex"], "has no effect where commands are tool calls", fix)
    settings = AgentYaml(path=path, task_kind=kind, **given)
    _check_templates(settings)
    return settings


def _checked(path: str, key: str, value: Any) -> Any:
    """A value as the settings hold it."""
    if key in NOT_OURS and value not in (None, 0):
        raise _refusal(path, key, value, f"is not the file's to say: {NOT_OURS[key]}", f"leave {key} out")
    if key in NOT_OURS:
        raise _refusal(path, key, value, "has no effect here", f"leave {key} out")
    if key not in TYPES:
        known = ", ".join(name for name in TYPES if name.startswith(key.partition(".")[0] + "."))
        raise _refusal(path, key, value, "is not a key of mini-swe-agent that psrl knows", f"use one of {known}")
    types, what = TYPES[key]
    is_fit = isinstance(value, types) and not isinstance(value, bool)
    if is_fit and int in types:
        is_fit = value >= (1 if key == "environment.timeout" else 0)
    elif key == "environment.cwd":
        is_fit = is_fit and value.startswith("/")
    elif key == "environment.env":
        is_fit = is_fit and all(isinstance(part, str) for item in value.items() for part in item)
    elif key == "environment.interpreter":
        is_fit = is_fit and bool(value) and all(isinstance(part, str) for part in value)
    elif key == "model.model_class":
        is_fit = is_fit and value in DEFAULT_FORMAT_ERROR
    elif key == "model.action_regex":
        is_fit = is_fit and _has_one_group(value)
    elif key == "model.model_kwargs":
        _check_model_kwargs(path, value if is_fit else {})
    if not is_fit:
        raise _refusal(path, key, value, f"must be {what}", f"write {key} as {what}")
    return tuple(value) if isinstance(value, list) else value


def _check_model_kwargs(path: str, value: Mapping[str, Any]) -> None:
    for name in value:
        if name not in MODEL_KWARGS:
            rule = "the model, its address and its sampling are the run's"
            fix = f"leave it out (known here: {', '.join(MODEL_KWARGS)}); sampling is rollout.temperature, top_p and top_k"
            raise _refusal(path, f"model.model_kwargs.{name}", value[name], rule, fix)


def _has_one_group(pattern: str) -> bool:
    try:
        return re.compile(pattern, re.DOTALL).groups == 1
    except re.error:
        return False


def _check_templates(settings: AgentYaml) -> None:
    variables = {
        "agent.system_template": PROMPT_VARIABLES,
        "agent.instance_template": PROMPT_VARIABLES,
        "model.observation_template": OBSERVATION_VARIABLES,
        "model.format_error_template": FORMAT_ERROR_VARIABLES,
    }
    for key, known in variables.items():
        text: str = vars(settings)[key.partition(".")[2]]
        try:
            used = jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(text))
        except jinja2.TemplateSyntaxError as error:
            rule = f"is no template that jinja can read ({error.message}, line {error.lineno})"
            raise _refusal(settings.path, key, text, rule, "correct the template") from error
        unknown = sorted(used - known)
        if unknown:
            raise _refusal(settings.path, key, text, f"uses {unknown[0]!r}, which is not there", f"use {', '.join(sorted(known))}")


def _refusal(path: str, key: str, value: Any, rule: str, fix: str) -> ConfigError:
    where = f"{KEY}: {Path(path).name}: {key}" if key else f"{KEY}: {Path(path).name}"
    return ConfigError(key=where, value=value if len(repr(value)) < 200 else f"{value!r:.200}...", rule=rule, fix=fix)
