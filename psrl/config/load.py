"""YAML, `key=value` overrides and defaults become one checked `Config`; the only user of Hydra.

Invariant: what `load_config` returns has passed every check that needs neither network nor another process, so a wrong
setting ends here, within a second, as a ConfigError with key, value, rule and fix.

A YAML file states only what differs from the dataclasses. It may begin with `defaults: [/gsm8k/config@_global_, _self_]`
to build on a recipe that psrl ships. Relative paths mean the working directory; `${package:recipes/x/y}` is a file of the
installed package. `train_actor_rollout_ref.rollout.*` is an interpolation of its `gen_...` twin until something sets it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from psrl.config.cross_checks import check_combinations, check_sft
from psrl.config.deployment_checks import check_deployment, derive_instances
from psrl.config.fields import leaves_of, section_keys, value_at
from psrl.config.file_checks import Needs, check_files
from psrl.config.ranges import CHOICES, check_values
from psrl.config.rollout import RolloutConfig
from psrl.config.tree import Config
from psrl.errors import ConfigError

PACKAGE_FOLDER = Path(__file__).resolve().parent.parent
RECIPES_FOLDER = PACKAGE_FOLDER / "recipes"
GEN_ROLLOUT = "gen_actor_rollout_ref.rollout"
TRAIN_ROLLOUT = "train_actor_rollout_ref.rollout"
LEAVES = {leaf.key: leaf for leaf in leaves_of(Config)}
SECTIONS = section_keys(Config)
PATH_KEYS = (
    "data.train_files",
    "data.trajectory_files",
    "data.val_files",
    "sft.train_files",
    "sft.output_path",
    "trainer.default_local_dir",
    "custom_reward_function.path",
    "sandbox.api_key_file",
    "train_actor_rollout_ref.model.path",
    "train_actor_rollout_ref.model.tokenizer_path",
    "train_actor_rollout_ref.ref.path",
    *(f"{rollout}.{key}" for rollout in (GEN_ROLLOUT, TRAIN_ROLLOUT) for key in ("script_path", "multi_turn.tool_config_path")),
    *(f"{rollout}.agent.agent_loop_config_path" for rollout in (GEN_ROLLOUT, TRAIN_ROLLOUT)),
)
"""Settings that name files: made absolute, because workers may have another working directory."""


OWN_NAME = re.compile(r"^recipe: ", re.MULTILINE)
UNDERSCORED_NUMBER = re.compile(r"[-+]?[\d_.]*\d_\d[\d_.]*(e[-+]?\d+)?", re.IGNORECASE)


class Purpose(StrEnum):
    """What the settings are loaded for; decides which files must be there."""

    TRAIN = "train"
    """Reinforcement learning."""
    DRY_RUN = "dry run"
    """Its plan: where nodes are described (`psrl.deployment`), model and rows may be there and not here."""
    VALIDATION = "validation"
    """Of a model that psrl's engines serve: training rows need not be here."""
    SFT = "sft"
    ENDPOINT = "endpoint"
    """Validation of a model that somebody else serves: neither model nor training rows need be here."""
    ROLLOUT = "rollout"
    """Episodes of the training tasks, played by psrl's engines and not trained on."""
    ENDPOINT_ROLLOUT = "endpoint rollout"
    """The same, by a model that somebody else serves."""
    REGRADE = "regrade"
    """New rewards of stored episodes: nothing is played."""
    SIMULATION = "simulation"
    """On virtual time: no file that the settings name need be here."""


NEEDS = {
    Purpose.TRAIN: Needs(),
    Purpose.DRY_RUN: Needs(),
    Purpose.VALIDATION: Needs(train_rows=False),
    Purpose.ENDPOINT: Needs(train_rows=False, model=False),
    Purpose.ROLLOUT: Needs(val_rows=False),
    Purpose.ENDPOINT_ROLLOUT: Needs(val_rows=False, model=False),
    Purpose.REGRADE: Needs(train_rows=False, val_rows=False, model=False, episodes=False),
    Purpose.SIMULATION: None,
}
UNTRAINED = (Purpose.ROLLOUT, Purpose.ENDPOINT_ROLLOUT, Purpose.REGRADE)


def load_config(recipe: str, overrides: Sequence[str] = (), *, purpose: Purpose = Purpose.TRAIN) -> Config:
    """Compose and check the settings of a run.

    Args:
        recipe: Name of a folder of `psrl/recipes`, or the path of a YAML file, or of a folder with config.yaml.
        overrides: `key=value` in Hydra's grammar, such as `psrl.rollout_n=4` or `data.train_files=[a.jsonl,b.jsonl]`.
        purpose: What will run.

    Raises:
        ConfigError: Something is wrong; nothing has been started.
    """
    path = recipe_path(recipe)
    _check_yaml(path)
    _check_overrides(overrides)
    config = _to_config(_compose(path, overrides))
    config.recipe = _name_of(path, config.recipe)
    if not config.import_folder:
        config.import_folder = str(Path.cwd() if path.is_relative_to(RECIPES_FOLDER) else path.parent)
    _make_paths_absolute(config)
    derive_instances(config)
    check_values(config)
    if purpose is Purpose.SFT:
        check_sft(config)
        return config
    check_combinations(config, is_trained=purpose not in UNTRAINED)
    check_deployment(config)
    needs = NEEDS[purpose]
    if purpose in (Purpose.TRAIN, Purpose.DRY_RUN) and config.data.trajectory_files:
        needs = Needs(train_rows=False, trajectories=True)
    is_elsewhere = purpose is Purpose.DRY_RUN and config.psrl.deployment.num_nodes > 0
    if needs is not None and not is_elsewhere:
        check_files(config, needs)
    return config


def where_runs_lie(recipe: str, overrides: Sequence[str] = ()) -> tuple[Path, str]:
    """(`trainer.default_local_dir`, name of the recipe), to find a run whose own settings count; no other setting is checked.

    Raises:
        ConfigError: There is no such recipe, or an override is none.
    """
    path = recipe_path(recipe)
    _check_yaml(path)
    _check_overrides(overrides)
    tree = _compose(path, overrides)
    return Path(tree.trainer.default_local_dir).absolute(), _name_of(path, tree.recipe)


def to_yaml(config: Config) -> str:
    """The resolved settings; loading this text gives the same Config."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def recipe_names() -> list[str]:
    """Recipes that the package ships."""
    return sorted(path.parent.name for path in RECIPES_FOLDER.glob("*/config.yaml"))


def configuration_names() -> list[str]:
    """Further settings of shipped recipes, such as `retool/qwen3_4b`: every other YAML file in their folders that names itself."""
    files = (path for path in RECIPES_FOLDER.rglob("*.yaml") if path.name != "config.yaml" and OWN_NAME.search(path.read_text()))
    return sorted(str(path.relative_to(RECIPES_FOLDER).with_suffix("")) for path in files)


def recipe_path(recipe: str) -> Path:
    """The YAML file that `recipe` names.

    Raises:
        ConfigError: There is none; the message lists the shipped recipes.
    """
    shipped = (RECIPES_FOLDER / recipe / "config.yaml", RECIPES_FOLDER / f"{recipe}.yaml")
    for candidate in (*shipped, Path(recipe) / "config.yaml", Path(recipe)):
        if recipe and candidate.is_file():
            return candidate.resolve()
    close = difflib.get_close_matches(recipe, [*recipe_names(), *configuration_names()], n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    fix = f"{hint}use one of {', '.join(recipe_names())}, or the path of a YAML file, or of a folder with config.yaml"
    raise ConfigError(key="recipe", value=recipe, rule="is no recipe of the package, no YAML file and no folder with config.yaml", fix=fix)


def _name_of(path: Path, given: str) -> str:
    return given or (path.parent.name if path.name == "config.yaml" else path.stem)


def _check_yaml(path: Path) -> None:
    """Names and types of one YAML file, with its path in the error."""
    try:
        texts = dict(_texts_of(yaml.compose(path.read_text(), Loader=yaml.SafeLoader), ""))
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, OSError, ValueError) as error:
        raise ConfigError(key="recipe", value=str(path), rule=f"cannot be read as YAML ({error})", fix="correct the file") from error
    if not isinstance(content, dict):
        raise ConfigError(key="recipe", value=str(path), rule="must hold a mapping of settings", fix="write `key: value` lines")
    content.pop("defaults", None)
    for key, value in _flatten(content, ""):
        _check_underscores(key, value, texts.get(key))
        _check_key_and_type(key, value, where=f" (in {path.name})")


def _texts_of(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, str]]:
    """Each single value as it stands in the file, by dotted key."""
    for name, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(value, yaml.ScalarNode):
            yield f"{prefix}{name.value}", value.value
        else:
            yield from _texts_of(value, f"{prefix}{name.value}.")


def _check_underscores(key: str, value: Any, text: str | None) -> None:
    """YAML and Hydra read 1_5 as 15, which may be meant as two bounds, or as a name; in whole numbers it is nothing but a space."""
    leaf = LEAVES.get(key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if leaf is None or leaf.base is int or not is_number or text is None or not UNDERSCORED_NUMBER.fullmatch(text.strip()):
        return
    rule = f"is read as the number {value:g}: an underscore between digits does not separate"
    fix = f"write two numbers with decimal points ({key}=0.5_5.0), a name in quotes ('{key}=\"{text.strip()}\"'), or one number without _"
    raise ConfigError(key=key, value=text.strip(), rule=rule, fix=fix)


def _flatten(content: dict[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in content.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in LEAVES:
            yield from _flatten(value, f"{key}.")
        else:
            yield key, value


def _check_overrides(overrides: Sequence[str]) -> None:
    for text in overrides:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            rule = f"is not an override of the form key=value ({str(error).splitlines()[0]})"
            fix = "write key=value without spaces around =; quote values with special characters: 'key=\"a b\"'"
            raise ConfigError(key=text.split("=")[0], value=text, rule=rule, fix=fix) from error
        key = override.key_or_group
        if override.is_delete() or override.is_add() or override.is_force_add() or override.is_sweep_override():
            rule = "only key=value is possible: settings are neither added, deleted nor swept"
            raise ConfigError(key=key, value=text, rule=rule, fix=f"write {key}=VALUE")
        _check_underscores(key, override.value(), text.partition("=")[2])
        _check_key_and_type(key, override.value(), where="")


def _check_key_and_type(key: str, value: Any, *, where: str) -> None:
    leaf = LEAVES.get(key)
    if leaf is not None:
        if not _is_interpolation(value) and not leaf.accepts(value):
            rule = f"must be {leaf.type_name}, got {type(value).__name__}{where}"
            is_choice = value is None and key in CHOICES and "null" in CHOICES[key]
            quoted = f", or the choice null in quotes: {key}='\"null\"'" if is_choice else ""
            raise ConfigError(key=key, value=value, rule=rule, fix=f"write {leaf.example()}{quoted}")
        return
    if key in SECTIONS:
        if value in ({}, None):
            return
        fix = f"set one of its settings, such as {SECTIONS[key]}"
        raise ConfigError(key=key, value=value, rule=f"is a section, not a setting{where}", fix=fix)
    raise ConfigError(key=key, value=value, rule=f"is no setting of psrl{where}", fix=_nearest_key(key))


def _nearest_key(key: str) -> str:
    known = list(LEAVES)
    last = key.rsplit(".", 1)[-1]
    same_end = [name for name in known if name.endswith(f".{key}")]
    same_name = same_end or [name for name in known if name.rsplit(".", 1)[-1] == last]
    close = difflib.get_close_matches(key, same_name or known, n=1, cutoff=0.0 if same_name else 0.6)
    if close:
        return f"did you mean {close[0]}?"
    similar = difflib.get_close_matches(last, sorted({name.rsplit(".", 1)[-1] for name in known}), n=1)
    if similar:
        return f"did you mean {next(name for name in known if name.rsplit('.', 1)[-1] == similar[0])}?"
    return "remove it; `psrl train RECIPE --dry-run` prints every setting"


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _package_path(relative: str) -> str:
    return str(PACKAGE_FOLDER / relative)


@cache
def _schema() -> DictConfig:
    """The typed tree, with validation rollouts following training rollouts."""
    schema: DictConfig = OmegaConf.structured(Config)
    for leaf in leaves_of(RolloutConfig):
        OmegaConf.update(schema, f"{TRAIN_ROLLOUT}.{leaf.key}", f"${{{GEN_ROLLOUT}.{leaf.key}}}")
    return schema


def _compose(path: Path, overrides: Sequence[str]) -> DictConfig:
    OmegaConf.register_new_resolver("package", _package_path, replace=True)
    store = ConfigStore.instance()
    store.store(name="psrl_schema", node=_schema())
    entry = {"defaults": ["psrl_schema", path.stem, "_self_"], "hydra": {"searchpath": [f"file://{RECIPES_FOLDER}"]}}
    store.store(name="psrl_entry", node=entry)
    try:
        with hydra.initialize_config_dir(config_dir=str(path.parent), version_base="1.3"):
            composed: DictConfig = hydra.compose(config_name="psrl_entry", overrides=list(overrides))
            return composed
    except (HydraException, OmegaConfBaseException) as error:
        raise _as_config_error(error) from error


def _to_config(tree: DictConfig) -> Config:
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise _as_config_error(error) from error
    assert isinstance(config, Config), f"composed a {type(config).__name__}"
    return config


def _as_config_error(error: BaseException) -> ConfigError:
    """What OmegaConf found that the checks above cannot: mandatory values, broken interpolations, defaults lists."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OmegaConfBaseException):
        cause = cause.__cause__
    key = (cause.full_key if isinstance(cause, OmegaConfBaseException) else None) or "recipe"
    text = str(cause or error).splitlines()[0]
    if "issing mandatory value" in text:
        return ConfigError(
            key=key, value="???", rule="has no default and must be set", fix=f"set {key}=... in the YAML or on the command line"
        )
    return ConfigError(key=key, value=None, rule=text, fix="correct the YAML or the override")


def _make_paths_absolute(config: Config) -> None:
    for key in PATH_KEYS:
        section, _, name = key.rpartition(".")
        owner, value = value_at(config, section), value_at(config, key)
        if isinstance(value, list):
            setattr(owner, name, [str(Path(item).absolute()) for item in value])
        elif value:
            setattr(owner, name, str(Path(value).absolute()))
