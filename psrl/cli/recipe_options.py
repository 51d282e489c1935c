"""Options that a recipe's own function takes: each keyword parameter is one, and anything else on the command line is refused.

def prepare(source, output, *, subset: int = 0, validate: bool = False)   ->   --subset N   --validate / --no-validate
"""

from __future__ import annotations

import difflib
import inspect
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psrl.errors import ConfigError

CONVERSIONS: dict[type, Callable[[str], Any]] = {str: str, int: int, float: float, Path: Path}
NO = "no-"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeOption:
    """One parameter, as it is written on the command line."""

    name: str
    """Of the parameter."""
    kind: type

    @property
    def flag(self) -> str:
        """`--split-by` of `split_by`."""
        return f"--{self.name.replace('_', '-')}"

    def __str__(self) -> str:
        return self.flag if self.kind is bool else f"{self.flag} {self.kind.__name__.upper()}"


def options_of(function: Callable[..., Any], *, but: Sequence[str]) -> list[RecipeOption]:
    """The parameters that can be given on a command line, without those named in `but`."""
    hints = typing.get_type_hints(function)
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in but or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        kind = _kind_of(hints.get(name, str))
        if kind is not None:
            found.append(RecipeOption(name=name, kind=kind))
    return found


def described(function: Callable[..., Any], options: Sequence[RecipeOption]) -> list[tuple[str, str]]:
    """(how an option is written, what the function's docstring says of it) of each."""
    said = dict(re.findall(r"^ +(\w+): (.+)$", inspect.getdoc(function) or "", re.MULTILINE))
    return [
        (str(option) if option.kind is not bool else f"{option.flag} / --{NO}{option.flag[2:]}", said.get(option.name, ""))
        for option in options
    ]


def read_options(words: Sequence[str], options: Sequence[RecipeOption], *, command: str) -> dict[str, Any]:
    """Arguments by parameter's name.

    Args:
        words: What is left of the command line: `--subset 5`, `--subset=5`, `--validate`, `--no-validate`.
        options: What the recipe takes.
        command: For errors, such as `psrl prepare swe`.

    Raises:
        ConfigError: A word is none of them, has no value or a wrong one, or is there twice.
    """
    given: dict[str, Any] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        flag, has_value, value = word.partition("=")
        option, is_on = _option_named(flag, options, command)
        if option.name in given:
            raise ConfigError(key=option.flag, value=word, rule="is there twice", fix="leave one of them out")
        if option.kind is bool:
            if has_value:
                raise ConfigError(
                    key=option.flag, value=value, rule="takes no value", fix=f"write {option.flag} or --{NO}{option.flag[2:]}"
                )
            given[option.name] = is_on
            continue
        if not has_value:
            if not left or left[0].startswith("--"):
                raise ConfigError(key=option.flag, value=None, rule="needs a value", fix=f"write {option}")
            value = left.pop(0)
        given[option.name] = _converted(option, value)
    return given


def _option_named(flag: str, options: Sequence[RecipeOption], command: str) -> tuple[RecipeOption, bool]:
    for option in options:
        if flag == option.flag:
            return option, True
        if option.kind is bool and flag == f"--{NO}{option.flag[2:]}":
            return option, False
    known = ", ".join(["--source", "--output", *map(str, options)])
    close = difflib.get_close_matches(flag, ["--source", "--output", *(option.flag for option in options)], n=1)
    fix = f"did you mean {close[0]}?" if close else "leave it out"
    raise ConfigError(key=flag, value=flag, rule=f"is no option of {command}, which takes {known}", fix=fix)


def _converted(option: RecipeOption, text: str) -> Any:
    try:
        return CONVERSIONS[option.kind](text)
    except ValueError as error:
        what = {int: "a whole number", float: "a number"}[option.kind]
        raise ConfigError(key=option.flag, value=text, rule=f"must be {what}", fix=f"write {option}") from error


def _kind_of(hint: Any) -> type | None:
    """The type that a word is read as; None where no word can be."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        inner = [each for each in typing.get_args(hint) if each is not type(None)]
        return _kind_of(inner[0]) if len(inner) == 1 else None
    return hint if hint is bool or hint in CONVERSIONS else None
