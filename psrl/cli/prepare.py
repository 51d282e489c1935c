"""`psrl prepare`: a recipe's data and models, made from what lies on this machine."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Annotated

import click
import typer
from typer.core import TyperCommand

from psrl.cli.arguments import Recipe
from psrl.cli.recipe_options import RecipeOption, described, options_of, read_options
from psrl.errors import ConfigError

OWN_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Words that this command does not know are the recipe's."""

WORDS = "psrl.words"


class PrepareCommand(TyperCommand):
    """Its help shows the options of the recipe that is named."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        """Keep the words: help is shown before they are read."""
        context.meta[WORDS] = list(args)
        return super().parse_args(context, args)

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """The recipe's own options with what its docstring says."""
        recipe = next((word for word in context.meta[WORDS] if not word.startswith("-")), None)
        formatter.write_paragraph()
        if recipe is None:
            formatter.write_text("Recipes have options of their own: psrl prepare RECIPE --help, and docs/recipes/RECIPE/prepare.md.")
            return
        function, options = _function_of(_folder_of(recipe))
        with formatter.section(f"Options of {recipe}"):
            formatter.write_dl(described(function, options) or [("none", "")])


def prepare(
    context: typer.Context,
    recipe: Recipe,
    source: Annotated[Path | None, typer.Option("--source", help="File or folder to read; see the recipe's README.")] = None,
    output: Annotated[Path | None, typer.Option("--output", help="Folder to write; else the recipe's default.")] = None,
) -> None:
    """Make what RECIPE needs before it can train, and check it.

    Calls `prepare(source, output)` of the recipe's prepare.py; its other parameters are options: `subset: int` is --subset N.
    """
    folder = _folder_of(recipe)
    if source is not None and not source.exists():
        raise ConfigError(key="--source", value=str(source), rule="is not on this machine", fix="name a file or folder that exists")
    function, options = _function_of(folder)
    function(source=source, output=output, **read_options(context.args, options, command=f"psrl prepare {recipe}"))


def _folder_of(recipe: str) -> Path:
    from psrl.config.load import recipe_path

    folder = recipe_path(recipe).parent
    if not (folder / "prepare.py").is_file():
        raise ConfigError(key="recipe", value=recipe, rule="needs no preparation (it has no prepare.py)", fix=f"run psrl train {recipe}")
    return folder


def _function_of(folder: Path) -> tuple[Callable[..., object], list[RecipeOption]]:
    function = _module_of(folder).prepare
    return function, options_of(function, but=("source", "output"))


def _module_of(folder: Path) -> ModuleType:
    """The recipe's prepare.py: of the package, or of the user's own folder."""
    from psrl.config.load import RECIPES_FOLDER

    if folder.parent == RECIPES_FOLDER:
        return importlib.import_module(f"psrl.recipes.{folder.name}.prepare")
    spec = importlib.util.spec_from_file_location("recipe_prepare", folder / "prepare.py")
    assert spec is not None, folder
    assert spec.loader is not None, folder
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
