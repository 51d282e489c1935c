"""Every registry of a run, filled and compared with the settings before anything starts.

Generators are not among them: `load_tasks` resolves theirs at once.
"""

from __future__ import annotations

import sys

import psrl.rewards.custom
import psrl.rewards.math_scorer
import psrl.rewards.retool
import psrl.rewards.scorer  # noqa: F401
from psrl.agent_data.base import agent_data
from psrl.agent_loops.base import agent_loops
from psrl.algorithms.advantages import advantage_estimators
from psrl.algorithms.losses import policy_losses
from psrl.chat.parsers.base import tool_formats
from psrl.config.cross_checks import check_names
from psrl.config.tree import Config
from psrl.environments.base import environments
from psrl.rewards.base import scorers
from psrl.telemetry.trackers import trackers


def check_registered_names(config: Config) -> None:
    """Resolve every name that settings choose; `import_folder` may hold the user's own classes.

    Raises:
        ConfigError: A name is neither registered nor importable.
    """
    if config.import_folder not in sys.path:
        sys.path.insert(0, config.import_folder)
    registries = {
        "algorithm.adv_estimator": advantage_estimators,
        "train_actor_rollout_ref.actor.policy_loss": policy_losses,
        "reward.name": scorers,
        "trainer.logger": trackers,
    }
    for side in ("gen_actor_rollout_ref", "train_actor_rollout_ref"):
        registries[f"{side}.rollout.multi_turn.format"] = tool_formats
        registries[f"{side}.rollout.agent.default_agent_loop"] = agent_loops
        registries[f"{side}.rollout.agent.env.name"] = environments
        registries[f"{side}.rollout.agent.data.name"] = agent_data
    check_names(config, {key: registry.names for key, registry in registries.items()})
