"""Reads `tool_config_path`: the YAML list of tools of a run.

    tools:
      - name: code_interpreter                  # a registered name
      - class_name: my_package.tools.Search     # a class: called with its `config` as keywords
        config: {top_k: 3}
        tool_schema: {type: function, function: {name: search, description: ..., parameters: {...}}}
      - name: my_package.tools.add              # a function, decorated or not

A class that has a parameter `program_runner` gets the run's; one with a parameter `schema` gets the entry's `tool_schema`.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import yaml

from psrl.errors import ConfigError
from psrl.protocols import ProgramRunner, Tool
from psrl.tools.base import FunctionTool, tools
from psrl.types import ToolSchema

ENTRY_KEYS = {"name", "class_name", "config", "tool_schema"}
NATIVE = "native"
"""verl's files mark tools that are Python classes with `config.type: native`; here all are."""
KEY = "rollout.multi_turn.tool_config_path"


def load_tools(tool_config_path: str, *, program_runner: ProgramRunner) -> list[Tool]:
    """The tools that the file lists, in its order.

    Raises:
        ConfigError: The file or an entry is wrong; names the key, the value and the fix.
    """
    path = Path(tool_config_path)
    if not path.is_file():
        raise ConfigError(key=KEY, value=tool_config_path, rule="is no file", fix="give the path of a YAML file with a `tools:` list")
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(key=KEY, value=tool_config_path, rule=f"is not YAML ({error})", fix="correct the file") from error
    if not isinstance(tree, dict) or set(tree) != {"tools"} or not isinstance(tree["tools"], list):
        raise ConfigError(
            key=KEY, value=tool_config_path, rule="must hold one list under `tools:`", fix="tools: [{name: code_interpreter}]"
        )
    return [_load_entry(entry, key=f"tools[{position}]", program_runner=program_runner) for position, entry in enumerate(tree["tools"])]


def _load_entry(entry: Any, *, key: str, program_runner: ProgramRunner) -> Tool:
    if not isinstance(entry, dict):
        raise ConfigError(key=key, value=entry, rule="is no mapping", fix="{name: code_interpreter}")
    unknown = sorted(set(entry) - ENTRY_KEYS)
    if unknown:
        raise ConfigError(
            key=f"{key}.{unknown[0]}", value=entry[unknown[0]], rule="unknown key", fix=f"use {', '.join(sorted(ENTRY_KEYS))}"
        )
    if ("name" in entry) == ("class_name" in entry):
        raise ConfigError(key=key, value=entry, rule="needs exactly one of name and class_name", fix="{name: code_interpreter}")
    name = entry["name"] if "name" in entry else entry["class_name"]
    settings = entry["config"] if entry.get("config") is not None else {}
    if not isinstance(name, str) or not isinstance(settings, dict):
        raise ConfigError(key=key, value=entry, rule="a name is text and config a mapping", fix="{name: my_package.Tool, config: {}}")
    if settings.get("type") == NATIVE:
        settings = {name: value for name, value in settings.items() if name != "type"}
    schema = _read_schema(entry["tool_schema"], key=f"{key}.tool_schema") if entry.get("tool_schema") is not None else None
    found = tools.resolve(name)
    if inspect.isclass(found):
        return _make(found, settings, schema, key=key, program_runner=program_runner)
    if settings or schema is not None:
        raise ConfigError(key=key, value=entry, rule="a function has neither config nor tool_schema", fix="remove them")
    if isinstance(found, Tool):
        return found
    if not callable(found):
        raise ConfigError(key=key, value=name, rule="is neither a tool class nor a function", fix="name a class or function")
    return FunctionTool(found, name=found.__name__)


def _make(cls: type, settings: dict[str, Any], schema: ToolSchema | None, *, key: str, program_runner: ProgramRunner) -> Tool:
    parameters = inspect.signature(cls).parameters
    given = dict(settings)
    if "program_runner" in parameters:
        given["program_runner"] = program_runner
    if schema is not None:
        if "schema" not in parameters:
            raise ConfigError(
                key=f"{key}.tool_schema", value=schema.name, rule=f"{cls.__name__} takes no `schema`", fix="remove tool_schema"
            )
        given["schema"] = schema
    try:
        inspect.signature(cls).bind(**given)
    except TypeError as error:
        known = ", ".join(name for name in parameters if name not in ("program_runner", "schema")) or "nothing"
        raise ConfigError(key=f"{key}.config", value=settings, rule=str(error), fix=f"{cls.__name__} takes {known}") from error
    made = cls(**given)
    if not isinstance(made, Tool):
        raise ConfigError(key=key, value=cls.__name__, rule="has no schema, call and close", fix="implement psrl.protocols.Tool")
    return made


def _read_schema(raw: Any, *, key: str) -> ToolSchema:
    function = raw["function"] if isinstance(raw, dict) and "function" in raw else raw
    kinds = {"name": str, "description": str, "parameters": dict}
    if not isinstance(function, dict) or not all(isinstance(function.get(part), kind) for part, kind in kinds.items()):
        raise ConfigError(
            key=key, value=raw, rule="is no function schema", fix="{type: function, function: {name, description, parameters}}"
        )
    return ToolSchema(name=function["name"], description=function["description"], parameters=function["parameters"])
