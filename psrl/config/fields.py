"""The settings tree as a flat table: dotted key, type and default of every leaf."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Leaf:
    """One setting."""

    key: str
    """Dotted, from the root: `psrl.rollout_n`."""
    annotation: Any
    default: Any

    @property
    def is_optional(self) -> bool:
        """Whether null is a value."""
        return type(None) in typing.get_args(self.annotation)

    @property
    def base(self) -> Any:
        """The type without None: bool, int, float, str or list."""
        if isinstance(self.annotation, types.UnionType):
            return next(kind for kind in typing.get_args(self.annotation) if kind is not type(None))
        return typing.get_origin(self.annotation) or self.annotation

    @property
    def item(self) -> Any:
        """The type of a list's items: str or int."""
        return typing.get_args(self.annotation)[0] if self.base is list else None

    @property
    def type_name(self) -> str:
        """For people."""
        lists = "a list of whole numbers" if self.item is int else "a list of texts"
        noun = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: lists}[self.base]
        return f"{noun} or null" if self.is_optional else noun

    def accepts(self, value: Any) -> bool:
        """Whether `value`, as YAML reads it, has this setting's type; whole numbers are numbers, booleans are not."""
        if value is None:
            return self.is_optional
        if self.base is bool:
            return isinstance(value, bool)
        if self.base is int:
            return isinstance(value, int) and not isinstance(value, bool)
        if self.base is float:
            return isinstance(value, int | float) and not isinstance(value, bool)
        if self.base is list:
            return isinstance(value, list) and all(isinstance(item, self.item) and not isinstance(item, bool) for item in value)
        # An unquoted 7 or true is no text for YAML, yet a fine experiment name.
        return not isinstance(value, list | dict)

    def example(self) -> str:
        """`key=value` with a value of the right type."""
        examples = {bool: "true", int: "1", float: "1.0", str: "text", list: "[1,2]" if self.item is int else "[a,b]"}
        default = self.default
        shown = examples[self.base] if default in (None, "", "???", []) or isinstance(default, bool | list) else default
        return f"{self.key}={shown}"


def leaves_of(section: type, prefix: str = "") -> Iterator[Leaf]:
    """Every setting below a section's dataclass, in file order."""
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        key, annotation = f"{prefix}{field.name}", hints[field.name]
        if dataclasses.is_dataclass(annotation):
            assert isinstance(annotation, type)
            yield from leaves_of(annotation, f"{key}.")
        else:
            default = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
            yield Leaf(key=key, annotation=annotation, default=default)


def section_keys(root: type) -> dict[str, str]:
    """Dotted key of each section -> its first setting."""
    sections: dict[str, str] = {}
    for leaf in leaves_of(root):
        words = leaf.key.split(".")
        for end in range(1, len(words)):
            sections.setdefault(".".join(words[:end]), leaf.key)
    return sections


def value_at(config: Any, key: str) -> Any:
    """The value of a dotted key."""
    for name in key.split("."):
        config = vars(config)[name]
    return config
