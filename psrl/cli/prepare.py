"""`psrl prepare`: a recipe's data and models, made from what lies on this machine."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from psrl.cli.arguments import Recipe
from psrl.errors import ConfigError


def prepare(
    recipe: Recipe,
    source: Annotated[Path | None, typer.Option("--source", help="File or folder to read; see the recipe's README.")] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Folder to write; else the recipe's default.")] = None,
) -> None:
    """Make what RECIPE needs before it can train, and check it.

    Calls `prepare(source, output)` of the recipe's prepare.py.
    """
    from psrl.config.load import RECIPES_FOLDER, recipe_path

    folder = recipe_path(recipe).parent
    if not (folder / "prepare.py").is_file():
        raise ConfigError(key="recipe", value=recipe, rule="needs no preparation (it has no prepare.py)", fix=f"run psrl train {recipe}")
    if source is not None and not source.exists():
        raise ConfigError(key="--source", value=str(source), rule="is not on this machine", fix="name a file or folder that exists")
    if folder.parent == RECIPES_FOLDER:
        module = importlib.import_module(f"psrl.recipes.{folder.name}.prepare")
    else:
        spec = importlib.util.spec_from_file_location("recipe_prepare", folder / "prepare.py")
        assert spec is not None, folder
        assert spec.loader is not None, folder
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    module.prepare(source=source, output=output)
