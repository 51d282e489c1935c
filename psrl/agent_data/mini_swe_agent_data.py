"""`mini_swe_agent_data`: mini-swe-agent's conversation, built natively. The counterpart of `mini_swe_env`.

With the same seeds its token ids are those of the black-box loop `mini_swe_agent`, as a test shows, but for one case: a turn that
cannot be read. mini-swe-agent forgets such a turn, which opens a branch in its session; here nothing that was sampled is ever forgotten.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from typing import Any

from psrl.agent_data.base import AgentDataParts, Info, register_agent_data
from psrl.agent_data.conversation import ConversationAgentData
from psrl.config.agent_yaml import AgentYaml, read_agent_yaml
from psrl.errors import ConfigError, EnvironmentFault
from psrl.swe.agent_turn import AgentAction, CommandAnswer, first_messages, prompt_variables, read_turn, render, tools_of
from psrl.types import Message, ParsedTurn, Role, SweProblem, Task


@register_agent_data("mini_swe_agent_data")
class MiniSweAgentData(ConversationAgentData[AgentAction]):
    """Prompts, actions and observations by the templates of the agent's YAML."""

    def __init__(self, parts: AgentDataParts) -> None:
        """One object serves one episode.

        Raises:
            ConfigError: The YAML is not set or wrong.
        """
        super().__init__(parts)
        path = parts.agent_loop_config_path
        if path is None:
            key = "rollout.agent.agent_loop_config_path"
            raise ConfigError(key=key, value=None, rule="mini_swe_agent_data needs the agent's YAML", fix=f"set {key}=mini_swe.yaml")
        self._settings: AgentYaml = read_agent_yaml(path)
        self._tool_schemas = tools_of(self._settings)
        self._step_limit = parts.multi_turn.max_turns
        self._wall_s = parts.sandbox_wall_s
        self._began = time.monotonic()
        self._action = AgentAction()
        self._num_format_errors = 0

    def begin(self, task: Task, observation: Any, info: Info) -> None:
        """Render the system's and the task's message."""
        if not isinstance(observation, SweProblem):
            raise EnvironmentFault(f"mini_swe_agent_data needs the problem of mini_swe_env, got {type(observation).__name__}")
        system = platform.uname()
        self._constants = prompt_variables(self._settings, observation, step_limit=self._step_limit, wall_s=self._wall_s, system=system)
        super().begin(task, first_messages(self._settings, self._variables()), info)

    def read_action(self, parsed: ParsedTurn) -> AgentAction:
        """The turn's commands, or what is wrong with it."""
        self._action = read_turn(parsed, self._settings, finish_reason="tool_calls" if parsed.calls else "stop")
        self._num_format_errors += self._action.format_error is not None
        return self._action

    def observe(self, observation: Any, info: Info) -> None:
        """Render the answers to the turn's commands, or what was wrong with the turn."""
        super().observe(self._messages_of(observation), info)

    def counts(self) -> dict[str, float]:
        """`format_errors`: turns that could not be read."""
        return {"format_errors": float(self._num_format_errors)}

    def _messages_of(self, answers: Sequence[CommandAnswer]) -> Sequence[Message]:
        if self._action.format_error is not None:
            return (Message(role=Role.USER, content=self._action.format_error),)
        texts = [render(self._settings.observation_template, {**self._variables(), "output": _as_output(answer)}) for answer in answers]
        if self._settings.is_textbased:
            return [Message(role=Role.USER, content=text) for text in texts]
        return [
            Message(role=Role.TOOL, content=text, tool_call_id=call_id) for text, call_id in zip(texts, self._action.call_ids, strict=True)
        ]

    def _variables(self) -> dict[str, Any]:
        elapsed_s = int(time.monotonic() - self._began)
        return {**self._constants, "n_model_calls": self._trajectory.num_turns, "elapsed_seconds": elapsed_s}


def _as_output(answer: CommandAnswer) -> dict[str, Any]:
    return {"output": answer.output, "returncode": answer.returncode, "exception_info": answer.exception_info}
