"""What a resume may change: everything but the settings below, which decide what the checkpoint's numbers mean.

`config.yaml` of the run folder is what was in force. Overrides given with `--resume` apply on top of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from psrl.config.fields import leaves_of, value_at
from psrl.config.tree import Config
from psrl.errors import ConfigError

_TASKS = "decides which tasks there are and in which order, and the checkpoint is a place in that order"
_WEIGHTS = "is what the checkpoint's weights and tokens belong to"
FIXED: dict[str, str] = {
    "recipe": "names the run",
    "data.generator.name": _TASKS,
    "data.generator.num_train": _TASKS,
    "data.generator.seed": _TASKS,
    "data.prompt_key": _TASKS,
    "data.train_max_samples": _TASKS,
    "data.trajectory_files": _TASKS,
    "data.max_prompt_length": _TASKS,
    "data.filter_overlong_prompts": _TASKS,
    "data.max_bad_rows": _TASKS,
    "data.shuffle": _TASKS,
    "data.seed": _TASKS,
    "data.train_batch_size": "is the size of a step, and the checkpoint counts steps",
    "trainer.seed": "is what every random choice of the run derives from, those of validation too",
    "train_actor_rollout_ref.model.path": _WEIGHTS,
    "train_actor_rollout_ref.model.tokenizer_path": _WEIGHTS,
    "train_actor_rollout_ref.model.dtype": _WEIGHTS,
    "train_actor_rollout_ref.model.lora_rank": _WEIGHTS,
    "train_actor_rollout_ref.model.lora_alpha": _WEIGHTS,
    "train_actor_rollout_ref.model.target_modules": _WEIGHTS,
}
"""Setting -> why it may not change. `data.train_files` may: the tasks themselves are compared (`TaskSource.load_state_dict`)."""


def changed_settings(run_yaml: Path, config: Config) -> dict[str, tuple[Any, Any]]:
    """Setting -> (value of the run, value now), of those that differ. A setting that the run did not know had its default.

    Raises:
        ConfigError: The run's settings cannot be read.
    """
    try:
        content = yaml.safe_load(run_yaml.read_text())
    except (OSError, yaml.YAMLError) as error:
        fix = "name a folder runs/<recipe>/<start time>"
        raise ConfigError(key="--resume-from", value=str(run_yaml), rule=f"cannot be read ({error})", fix=fix) from error
    changed = {}
    for leaf in leaves_of(Config):
        old, new = _value_in(content, leaf.key, leaf.default), value_at(config, leaf.key)
        if old != new:
            changed[leaf.key] = (old, new)
    return changed


def check_changes(changed: Mapping[str, tuple[Any, Any]]) -> None:
    """Refuse what may not change.

    Raises:
        ConfigError: The first such setting, with both values.
    """
    for key, (old, new) in changed.items():
        if key in FIXED:
            rule = f"was {old!r} when the run was started, and a resume can't change it: it {FIXED[key]}"
            moved = "; if the same folder lies elsewhere now, say so in config.yaml of the run" if FIXED[key] is _WEIGHTS else ""
            raise ConfigError(key=key, value=new, rule=rule, fix=f"leave {key} out, or start a new run{moved}")


def _value_in(content: Any, key: str, default: Any) -> Any:
    for name in key.split("."):
        if not isinstance(content, dict) or name not in content:
            return default
        content = content[name]
    return content
