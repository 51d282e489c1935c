"""Whether `rollout.agent.agent_loop_config_path` is read by what the run plays, and fits its other settings."""

from __future__ import annotations

from typing import Any

from psrl.config.agent_yaml import read_agent_yaml
from psrl.config.fields import value_at
from psrl.config.rollout import RolloutConfig
from psrl.config.tree import Config
from psrl.errors import ConfigError

MINI_SWE_LOOP = "mini_swe_agent"
READERS = (MINI_SWE_LOOP, "mini_swe_env", "mini_swe_agent_data")
"""Names of what psrl ships that reads the file."""


def check_isolation(config: Config) -> None:
    """Projects with a bug are played and graded only where what runs cannot reach this machine's files, and in places that last.

    Raises:
        ConfigError: The backend is `process`, whose commands would run in this machine's own folder of that name, or `sandbox_fusion`.
    """
    backend = config.sandbox.backend
    if backend not in ("process", "sandbox_fusion"):
        return
    names = [config.reward.name] if config.reward.name == "execution" else []
    for side in (config.gen_actor_rollout_ref, config.train_actor_rollout_ref):
        agent = side.rollout.agent
        names += [name for name in (agent.default_agent_loop, agent.env.name, agent.data.name) if name in READERS]
    if names:
        rule = f"isolates nothing: with {names[0]}, what a policy wrote would run in this machine's own folders"
        if backend == "sandbox_fusion":
            rule = f"runs whole programs and keeps nothing, and {names[0]} needs a sandbox whose files stay"
        fix = "set sandbox.backend=bubblewrap (apt-get install bubblewrap) or sandbox.backend=docker"
        raise ConfigError(key="sandbox.backend", value=backend, rule=rule, fix=fix)


def check_agent_yaml(config: Config, rollout: str) -> None:
    """The path is set exactly where something may read it.

    Raises:
        ConfigError: The first broken rule.
    """
    section: RolloutConfig = value_at(config, rollout)
    agent, key = section.agent, f"{rollout}.agent.agent_loop_config_path"
    names = [name for name in (agent.default_agent_loop, agent.env.name, agent.data.name) if name]
    readers = [name for name in names if name in READERS]
    if readers and not agent.agent_loop_config_path:
        raise ConfigError(key=key, value=None, rule=f"{readers[0]} is set up by mini-swe-agent's YAML", fix=f"set {key}=mini_swe.yaml")
    # Classes of the user's may read it, and rows may name a loop that does.
    is_open = any("." in name for name in names) or config.psrl.rollout_gateway.enable
    if agent.agent_loop_config_path and not readers and not is_open:
        rule = f"is read by none of {', '.join(names)}"
        raise ConfigError(key=key, value=agent.agent_loop_config_path, rule=rule, fix=f"leave {key} out")
    if config.sandbox.allow_network and not readers and not is_open:
        rule = f"has no effect with {', '.join(names)}: only projects with a bug can ask for the network"
        raise ConfigError(key="sandbox.allow_network", value=True, rule=rule, fix="leave sandbox.allow_network out")
    if agent.default_agent_loop == MINI_SWE_LOOP:
        _check_loop(section, rollout)


def check_agent_yaml_file(config: Config, rollout: str) -> None:
    """The file's content, and where it says what the run's settings say too.

    Raises:
        ConfigError: The first broken rule, with the key inside the file.
    """
    section: RolloutConfig = value_at(config, rollout)
    agent, key = section.agent, f"{rollout}.agent.agent_loop_config_path"
    if agent.agent_loop_config_path is None or not plays_mini_swe(section):
        return
    settings = read_agent_yaml(agent.agent_loop_config_path, key=key)

    def refuse(inner: str, value: Any, rule: str, fix: str) -> ConfigError:
        return ConfigError(key=f"{key}: {inner}", value=value, rule=rule, fix=fix)

    max_turns = section.multi_turn.max_turns
    if settings.step_limit not in (0, max_turns):
        rule = f"differs from {rollout}.multi_turn.max_turns={max_turns}, which bounds every loop"
        raise refuse("agent.step_limit", settings.step_limit, rule, f"leave it out of the file, or set {rollout}.multi_turn.max_turns")
    if settings.wall_time_limit_seconds >= agent.episode_timeout_s:
        rule = f"is never reached: {rollout}.agent.episode_timeout_s={agent.episode_timeout_s:g} ends the episode first"
        raise refuse("agent.wall_time_limit_seconds", settings.wall_time_limit_seconds, rule, "leave it out of the file")
    wall_s, name = (settings.timeout, "environment.timeout") if settings.timeout else (config.sandbox.wall_s, "sandbox.wall_s")
    if agent.default_agent_loop != MINI_SWE_LOOP and wall_s >= agent.step_timeout_s:
        rule = f"a command that takes so long ends the episode ({rollout}.agent.step_timeout_s={agent.step_timeout_s:g})"
        raise refuse(name, wall_s, rule, f"set {rollout}.agent.step_timeout_s above {wall_s:g}")


def plays_mini_swe(section: RolloutConfig) -> bool:
    """Whether the default loop, environment or agent data of a rollout is mini-swe-agent's."""
    return any(name in READERS for name in (section.agent.default_agent_loop, section.agent.env.name, section.agent.data.name))


def _check_loop(section: RolloutConfig, rollout: str) -> None:
    agent, turns = section.agent, section.multi_turn
    if not turns.enable:
        fix = f"set {rollout}.multi_turn.enable=true and {rollout}.multi_turn.max_turns"
        raise ConfigError(key=f"{rollout}.multi_turn.enable", value=False, rule=f"{MINI_SWE_LOOP} takes many turns", fix=fix)
    dead = {
        "agent.env.name": agent.env.name,
        "agent.data.name": agent.data.name,
        "multi_turn.tool_config_path": turns.tool_config_path,
    }
    for name, value in dead.items():
        if value is not None:
            rule = f"has no effect with {MINI_SWE_LOOP}: the agent brings its own tool and conversation"
            raise ConfigError(key=f"{rollout}.{name}", value=value, rule=rule, fix=f"leave {rollout}.{name} out")
