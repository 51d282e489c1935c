"""The first prompt of a task as its episode will render it, and whether the task can be played at all: looked at before anything starts."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from psrl.config.agent_checks import plays_mini_swe
from psrl.config.agent_yaml import AgentYaml, read_agent_yaml
from psrl.config.rollout import RolloutConfig
from psrl.config.tree import Config
from psrl.errors import ConfigError, RowError
from psrl.protocols import Renderer
from psrl.runtime.names import check_loop_of
from psrl.swe.agent_turn import first_messages, prompt_variables, tools_of
from psrl.types import SweProblem, Task, ToolSchema


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
            ConfigError: The row names a loop that cannot be played, or is none for the agent's YAML; names the row.
        """
        check_loop_of(task, self._config)
        if not self._agents:
            return
        problem = _problem_of(task)
        for _, settings in self._agents:
            if problem.task_kind != settings.task_kind:
                rule = f"the agent's YAML {settings.path} was written for task_kind {settings.task_kind}"
                fix = f"set rollout.agent.agent_loop_config_path to a file of task_kind {problem.task_kind}, or leave such rows out"
                raise ConfigError(key=f"task_kind of {task.uid} ({problem.instance_id})", value=problem.task_kind, rule=rule, fix=fix)

    def _num_tokens(self, problem: SweProblem, rollout: RolloutConfig, settings: AgentYaml) -> int:
        wall_s, max_turns = self._config.sandbox.wall_s, rollout.multi_turn.max_turns
        variables = prompt_variables(settings, problem, step_limit=max_turns, wall_s=wall_s, system=platform.uname())
        return len(self._renderer.open(first_messages(settings, variables), tools_of(settings)))


def _agent_of(rollout: RolloutConfig) -> AgentYaml:
    path = rollout.agent.agent_loop_config_path
    assert path is not None, "checked when the settings were loaded"
    return read_agent_yaml(path)


def _problem_of(task: Task) -> SweProblem:
    try:
        return SweProblem.of_task(task)
    except RowError as error:
        key, rule = f"extra_info.swe of {task.uid}", f"mini-swe-agent plays projects with a bug ({error.detail})"
        fix = "make rows with `psrl prepare swe`, or play them with another loop"
        raise ConfigError(key=key, value=task.data_source, rule=rule, fix=fix) from error
