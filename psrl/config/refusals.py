"""How a rule refuses a setting: what every file of checks says in the same words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn

from psrl.config.fields import leaves_of, value_at
from psrl.config.tree import Config
from psrl.errors import ConfigError

DEFAULTS = {leaf.key: leaf.default for leaf in leaves_of(Config)}
"""Of every setting, by its key."""


def is_changed(config: Config, key: str) -> bool:
    """Whether a setting differs from its default."""
    return bool(value_at(config, key) != DEFAULTS[key])


def refuse(config: Config, key: str, rule: str, fix: str) -> NoReturn:
    """Raise ConfigError for a setting, with its value."""
    raise ConfigError(key=key, value=value_at(config, key), rule=rule, fix=fix)


def refuse_dead(config: Config, keys: Iterable[str], *, because: str, fix: str) -> None:
    """Settings that something else switches off must be left alone. Raises ConfigError for the first that is not."""
    for key in keys:
        if is_changed(config, key):
            refuse(config, key, f"has no effect while {because}", f"{fix}, or leave {key} out")
