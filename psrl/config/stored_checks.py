"""Training on stored trajectories (`data.trajectory_files`): which settings have no effect then, and how the episodes were sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from psrl.config.fields import value_at
from psrl.config.refusals import is_changed, refuse
from psrl.config.tree import Config
from psrl.errors import ConfigError

KEY = "data.trajectory_files"
OF_PLAYING = ("psrl.redundant_episodes", "psrl.redundant_groups", "psrl.proactive_filter.action", "psrl.routing.migrate")
"""Settings of how training episodes are played."""
CORRECTIONS = ("rollout_is", "rollout_rs", "rollout_token_veto_threshold")


def check_stored(config: Config) -> None:
    """Settings of playing must be left alone where nothing is played to train on.

    Raises:
        ConfigError: The first that is not.
    """
    if not config.data.trajectory_files:
        return
    for key in OF_PLAYING:
        if is_changed(config, key):
            rule = f"has no effect on stored trajectories ({KEY}): nothing is played to train on"
            refuse(config, key, rule, f"leave {key} out")


def check_stored_sampling(config: Config, path: Path) -> None:
    """Where the run folder of a file says how its episodes were sampled: ratios are of whole distributions.

    Raises:
        ConfigError: They were sampled from a cut one (top_p, top_k), and a ratio against the trainer's would correct the cut.
    """
    actor, correction = config.train_actor_rollout_ref.actor, config.algorithm.rollout_correction
    corrected = [name for name in CORRECTIONS if value_at(correction, name) is not None]
    if not corrected and actor.old_logprobs != "recompute":
        return
    rollout = _rollout_of(path.parent.parent / "config.yaml")
    is_cut = {"top_p": "top_p" in rollout and rollout["top_p"] < 1, "top_k": "top_k" in rollout and rollout["top_k"] > 0}
    for name in (name for name, cut in is_cut.items() if cut):
        rule = f"was sampled with {name}={rollout[name]}: its logprobs are of a cut distribution, which the trainer does not know"
        fix = "set train_actor_rollout_ref.actor.old_logprobs=rollout without algorithm.rollout_correction, or store episodes of all tokens"
        raise ConfigError(key=KEY, value=str(path), rule=rule, fix=fix)


def _rollout_of(run_yaml: Path) -> dict[str, Any]:
    """`gen_actor_rollout_ref.rollout` of a run's settings; empty where there are none to read."""
    try:
        content: dict[str, Any] = yaml.safe_load(run_yaml.read_text())["gen_actor_rollout_ref"]["rollout"]
    except (OSError, yaml.YAMLError, KeyError, TypeError):
        return {}
    return content
