"""What the settings name on disk is there: rows, models, tools, scripts, the user's own reward."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psrl.config.agent_checks import check_agent_yaml_file
from psrl.config.fields import value_at
from psrl.config.ranges import ROLLOUTS
from psrl.config.tree import Config
from psrl.errors import ConfigError

MODEL = "train_actor_rollout_ref.model"


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Which files what is going to run reads."""

    train_rows: bool = True
    val_rows: bool = True
    trajectories: bool = False
    """Stored ones, which are trained on."""
    model: bool = True
    """Not where somebody else serves it."""
    episodes: bool = True
    """What plays episodes: tools, scripts, an agent's YAML."""


def check_files(config: Config, needs: Needs) -> None:
    """Everything that the settings name on disk, and that is needed, is there.

    Raises:
        ConfigError: The first missing file, with its key.
    """
    data = config.data
    if needs.train_rows and not (data.train_files or data.generator.name):
        fix = "set data.train_files=[rows.jsonl]; for validation alone: psrl eval"
        raise ConfigError(key="data.train_files", value=[], rule="no source of training tasks is set", fix=fix)
    rows = (
        ("data.train_files", data.train_files, needs.train_rows),
        ("data.val_files", data.val_files, needs.val_rows),
        ("data.trajectory_files", data.trajectory_files, needs.trajectories),
    )
    for key, paths, are_needed in rows:
        for index, path in enumerate(paths if are_needed else ()):
            require_file(f"{key}[{index}]", path, config.recipe)
    if needs.model:
        check_model_files(config)
        for key in ("train_actor_rollout_ref.ref.path", "critic.model.path"):
            if value_at(config, key):
                _require_model_folder(key, value_at(config, key))
    optional = [f"{rollout}.{key}" for rollout in ROLLOUTS for key in ("multi_turn.tool_config_path", "script_path")]
    for key in ["custom_reward_function.path", *(optional if needs.episodes else ())]:
        if value_at(config, key):
            require_file(key, value_at(config, key))
    for rollout in ROLLOUTS if needs.episodes else ():
        check_agent_yaml_file(config, rollout)


def check_model_files(config: Config) -> None:
    """The model's folder, and its tokenizer's.

    Raises:
        ConfigError: One is not there.
    """
    model = config.train_actor_rollout_ref.model
    _require_model_folder(f"{MODEL}.path", model.path)
    if model.tokenizer_path and not Path(model.tokenizer_path).is_dir():
        _missing(f"{MODEL}.tokenizer_path", model.tokenizer_path, "a folder with a tokenizer")


def require_file(key: str, path: str, recipe: str = "") -> None:
    """Refuse a file that is not there; `recipe` is one that may make it."""
    if not Path(path).is_file():
        _missing(key, path, "a file", recipe)


def _require_model_folder(key: str, path: str) -> None:
    folder = Path(path)
    if not folder.is_dir():
        _missing(key, path, "a folder with config.json and weights")
    if not (folder / "config.json").is_file():
        raise ConfigError(key=key, value=path, rule="holds no config.json", fix="name the folder of a Hugging Face model")


def _missing(key: str, path: Any, what: str, recipe: str = "") -> None:
    is_ours = recipe != "" and (Path(__file__).parent.parent / "recipes" / recipe / "prepare.py").is_file()
    makes = f"or make it: psrl prepare {recipe}" if is_ours else "where a recipe makes it: psrl prepare RECIPE"
    fix = f"name {what} that exists (relative paths start at {Path.cwd()}); {makes}"
    raise ConfigError(key=key, value=path, rule="is not on this machine", fix=fix)
