"""Names for things that users choose: a table per kind, and dotted paths for what is not in the table.

Invariant: a name resolves to exactly one class or function for the life of the process.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from psrl.errors import ConfigError

Registered = TypeVar("Registered")


class Registry(Generic[Registered]):
    """One kind of thing by name.

    Example:
        `environments = Registry[type]("environment", key="rollout.agent.env.name")`, then `@environments.register("tool_env")`
        above the class, then `environments.resolve("tool_env")` or `environments.resolve("my_package.my_file.MyEnv")`.
    """

    def __init__(self, noun: str, *, key: str) -> None:
        """`noun` and `key` (the setting that chooses) appear in errors."""
        self._noun = noun
        self._key = key
        self._entries: dict[str, Registered] = {}

    def register(self, name: str) -> Callable[[Any], Any]:
        """Decorator that adds a class or function under `name`; a second one under the same name is a mistake."""

        def add(entry: Any) -> Any:
            known: Any = self._entries.setdefault(name, entry)
            same = known is entry or (known.__module__, known.__qualname__) == (entry.__module__, entry.__qualname__)
            assert same, f"{self._noun} {name!r} is registered twice: {known} and {entry}"
            self._entries[name] = entry
            return entry

        return add

    @property
    def names(self) -> tuple[str, ...]:
        """Registered names, sorted."""
        return tuple(sorted(self._entries))

    def resolve(self, name: str) -> Registered:
        """The entry of a registered name or of a dotted path `package.module.Name`.

        Raises:
            ConfigError: Neither; the message lists the known names.
        """
        if name in self._entries:
            return self._entries[name]
        module_name, _, attribute = name.rpartition(".")
        if not module_name:
            raise self._unknown(name, f"is no registered {self._noun}")
        try:
            found: Registered = getattr(importlib.import_module(module_name), attribute)
            return found
        except ImportError as error:
            raise self._unknown(name, f"cannot be imported ({error})") from error
        except AttributeError as error:
            raise self._unknown(name, f"module {module_name} has no {attribute}") from error

    def _unknown(self, name: str, rule: str) -> ConfigError:
        fix = f"use one of {', '.join(self.names) or '(none registered)'}, or a dotted path package.module.Class"
        return ConfigError(key=self._key, value=name, rule=rule, fix=fix)
