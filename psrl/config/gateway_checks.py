"""Whether a run has a gateway, and whether its settings fit the run's other ones."""

from __future__ import annotations

from psrl.config.fields import leaves_of
from psrl.config.refusals import refuse_dead
from psrl.config.rollout_gateway import SESSION_LOOPS
from psrl.config.tree import Config
from psrl.errors import ConfigError

KEY = "psrl.rollout_gateway"
APPENDING_LOOPS = ("generate_only_agent", "multi_turn_agent", "multi_turn_completion_agent")
"""Loops around one AgentData, whose trajectory only grows: none can open a branch."""


def starts_gateway(config: Config) -> bool:
    """Whether SMG and the session router are processes of this run."""
    rollouts = (config.gen_actor_rollout_ref.rollout, config.train_actor_rollout_ref.rollout)
    return config.psrl.rollout_gateway.enable or any(rollout.agent.default_agent_loop in SESSION_LOOPS for rollout in rollouts)


def check_gateway(config: Config) -> None:
    """Settings without a gateway have no effect; with one, a session must last as long as its episode and all must fit.

    Raises:
        ConfigError: The first broken rule.
    """
    gateway, rollout = config.psrl.rollout_gateway, config.gen_actor_rollout_ref.rollout
    if not starts_gateway(config):
        because = f"the run has no gateway (no default loop is one of {', '.join(SESSION_LOOPS)})"
        keys = [leaf.key for leaf in leaves_of(type(gateway), f"{KEY}.")]
        return refuse_dead(config, keys, because=because, fix=f"set {KEY}.enable=true")
    at_once = rollout.agent.max_concurrent_episodes + config.train_actor_rollout_ref.rollout.agent.max_concurrent_episodes
    num_episodes = rollout.agent.num_workers * at_once
    if gateway.max_sessions < num_episodes:
        both = "num_workers x max_concurrent_episodes, training and validation"
        rule = f"is less than the episodes that agent workers may play at once ({both}: {num_episodes})"
        fix = f"set {KEY}.max_sessions={num_episodes} or more, or lower gen_actor_rollout_ref.rollout.agent.max_concurrent_episodes"
        raise ConfigError(key=f"{KEY}.max_sessions", value=gateway.max_sessions, rule=rule, fix=fix)
    longest_s = max(rollout.agent.episode_timeout_s, config.train_actor_rollout_ref.rollout.agent.episode_timeout_s)
    if gateway.session_idle_timeout_s < longest_s:
        rule = f"forgets sessions of episodes that still run (agent.episode_timeout_s={longest_s:g})"
        fix = f"set {KEY}.session_idle_timeout_s={longest_s:g} or more"
        raise ConfigError(key=f"{KEY}.session_idle_timeout_s", value=gateway.session_idle_timeout_s, rule=rule, fix=fix)


def check_history_thinking(config: Config) -> None:
    """Only the session of a black-box agent can open a branch where the template drops reasoning.

    Raises:
        ConfigError: `strip` with a loop that only appends.
    """
    model, loop = config.train_actor_rollout_ref.model, config.gen_actor_rollout_ref.rollout.agent.default_agent_loop
    if model.history_thinking == "strip" and loop in APPENDING_LOOPS:
        key = "train_actor_rollout_ref.model.history_thinking"
        rule = f"has no effect with {loop}, whose trajectory only grows; sessions of black-box agents can branch"
        raise ConfigError(key=key, value="strip", rule=rule, fix=f"set {key}=keep, or train an agent that is a SessionAgentLoop")
