"""`psrl eval`: validation of a model, without training."""

from pathlib import Path
from typing import Annotated

import typer

from psrl.cli.arguments import Overrides, Recipe


def evaluate(
    recipe: Recipe,
    overrides: Overrides = None,
    model: Annotated[Path | None, typer.Option("--model", help="Model folder; else the recipe's.")] = None,
) -> None:
    """Validate a model on RECIPE's validation tasks."""
    from psrl.config.load import load_config
    from psrl.config.plan import make_plan, read_machine

    given = list(overrides or [])
    if model is not None:
        given.append(f"train_actor_rollout_ref.model.path={_quoted(model)}")
    config = load_config(recipe, given)
    make_plan(config, read_machine(), with_training=False)
    from psrl.cli.summary import print_summary
    from psrl.runtime import evaluation

    print_summary(evaluation.evaluate(config))


def _quoted(path: Path) -> str:
    """For Hydra's grammar, in which a path may hold characters that mean something."""
    escaped = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
