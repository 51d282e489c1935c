"""The first prompt of a task as its episode will render it, and whether the task can be played at all: looked at before anything starts."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache

from psrl.config.agent_checks import MINI_SWE_LOOP, plays_mini_swe
from psrl.config.agent_yaml import AgentYaml, read_agent_yaml
from psrl.config.rollout import RolloutConfig
from psrl.config.tree import Config
from psrl.errors import ConfigError, RewardError, RowError
from psrl.protocols import Renderer
from psrl.rewards.suite_logs import load_parsers
from psrl.runtime.names import check_loop_of
from psrl.swe.agent_turn import first_messages, prompt_variables, tools_of
from psrl.types import SweProblem, Task, ToolSchema

GRADING_MARGIN_S = 30.0
"""Of a grading beyond its tests: a sandbox, the project, the patch, and the end of tests that are late."""


class FirstPrompts:
    """Measures prompts by the run's own tokenizer."""

    def __init__(self, config: Config, renderer: Renderer, schemas: Sequence[ToolSchema]) -> None:
        """`schemas` are the run's tools."""
        self._config, self._renderer, self._schemas = config, renderer, schemas
        rollouts = (config.gen_actor_rollout_ref.rollout, config.train_actor_rollout_ref.rollout)
        self._agents = [(rollout, _agent_of(rollout)) for rollout in rollouts if plays_mini_swe(rollout)]

    def num_tokens(self, task: Task) -> int:
        """Of the task's first prompt, tools included; of the longer one where training and validation have different prompts.

        Raises:
            ConfigError: See `check`.
        """
        self.check(task)
        if not self._agents:
            return len(self._renderer.open(task.prompt, self._schemas))
        return max(self._num_tokens(_problem_of(task), rollout, settings) for rollout, settings in self._agents)

    def check(self, task: Task) -> None:
        """Whether the task can be played; renders nothing.

        Raises:
            ConfigError: The row names a loop that cannot be played, is none for the agent's YAML, or needs a sandbox or a grading
                that the run does not have; names the row.
        """
        check_loop_of(task, self._config)
        is_graded = self._config.reward.name == "execution"
        if not self._agents and not is_graded and task.agent_name != MINI_SWE_LOOP:
            return
        problem = _problem_of(task)
        for _, settings in self._agents:
            if problem.task_kind != settings.task_kind:
                rule = f"the agent's YAML {settings.path} was written for task_kind {settings.task_kind}"
                fix = f"set rollout.agent.agent_loop_config_path to a file of task_kind {problem.task_kind}, or leave such rows out"
                raise _refused(task, problem, "task_kind", problem.task_kind, rule, fix)
        self._check_place(task, problem)
        if is_graded:
            self._check_grading(task, problem)

    def _check_place(self, task: Task, problem: SweProblem) -> None:
        """Whether the run's sandboxes can hold the project."""
        backend = self._config.sandbox.backend
        unfit = {"process": "isolates nothing", "sandbox_fusion": "has no sandbox whose files stay"}
        if backend in unfit:
            fix = "set sandbox.backend=bubblewrap (apt-get install bubblewrap) or sandbox.backend=docker"
            raise _refused(task, problem, "agent_name", task.agent_name, f"sandbox.backend={backend} {unfit[backend]}", fix)
        if problem.image is not None and backend != "docker":
            fix = "set sandbox.backend=docker, or leave such rows out"
            raise _refused(task, problem, "image", problem.image, f"sandbox.backend={backend} has no images", fix)

    def _check_grading(self, task: Task, problem: SweProblem) -> None:
        """Whether the verdict can be had: time for the tests' own limit to be reached, and a parser for their output."""
        needed_s, timeout_s = problem.timeout_s + GRADING_MARGIN_S, self._config.reward.execution.timeout_s
        if timeout_s < needed_s:
            rule = f"its tests may take so long, and reward.execution.timeout_s={timeout_s:g} ends the whole grading"
            fix = f"set reward.execution.timeout_s={needed_s:g} or more, or leave such rows out"
            raise _refused(task, problem, "timeout_s", problem.timeout_s, rule, fix)
        if problem.log_parser is None:
            return
        try:
            known = _log_parsers()
        except RewardError as error:
            raise _refused(task, problem, "log_parser", problem.log_parser, str(error), "pip install 'psrl[swe]'") from error
        if problem.log_parser not in known:
            close = get_close_matches(problem.log_parser, known, n=1)
            fix = f"{f'did you mean {close[0]}? ' if close else ''}use one of {', '.join(known[:3])}, ..., or leave such rows out"
            raise _refused(task, problem, "log_parser", problem.log_parser, "the installed swebench has no such parser", fix)

    def _num_tokens(self, problem: SweProblem, rollout: RolloutConfig, settings: AgentYaml) -> int:
        wall_s, max_turns = self._config.sandbox.wall_s, rollout.multi_turn.max_turns
        variables = prompt_variables(settings, problem, step_limit=max_turns, wall_s=wall_s, system=platform.uname())
        return len(self._renderer.open(first_messages(settings, variables), tools_of(settings)))


def _agent_of(rollout: RolloutConfig) -> AgentYaml:
    path = rollout.agent.agent_loop_config_path
    assert path is not None, "checked when the settings were loaded"
    return read_agent_yaml(path)


@cache
def _log_parsers() -> tuple[str, ...]:
    return tuple(sorted(load_parsers()))


def _refused(task: Task, problem: SweProblem, name: str, value: object, rule: str, fix: str) -> ConfigError:
    return ConfigError(key=f"{name} of {task.uid} ({problem.instance_id})", value=value, rule=rule, fix=fix)


def _problem_of(task: Task) -> SweProblem:
    try:
        return SweProblem.of_task(task)
    except RowError as error:
        key, rule = f"extra_info.swe of {task.uid}", f"mini-swe-agent and reward.name=execution need projects with a bug ({error.detail})"
        fix = "make rows with `psrl prepare swe`, or play them with another loop and reward"
        raise ConfigError(key=key, value=task.data_source, rule=rule, fix=fix) from error
