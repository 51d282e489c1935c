"""`psrl eval`: validation of a model, without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psrl.cli.arguments import Overrides, Recipe
from psrl.config.endpoint import is_endpoint, read_endpoint, refuse_address_without_scheme
from psrl.errors import ConfigError


def evaluate(
    recipe: Recipe,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option("--model", help="Model folder, or URL of an OpenAI-compatible API; else the recipe's.")
    ] = None,
    model_name: Annotated[str | None, typer.Option("--model-name", help="With a URL: the model's name there.")] = None,
    api_key_env: Annotated[str | None, typer.Option("--api-key-env", help="With a URL: environment variable with the key.")] = None,
) -> None:
    """Validate a model on RECIPE's validation tasks."""
    from psrl.config.load import Purpose, load_config

    given = list(overrides or [])
    if model is not None and is_endpoint(model):
        endpoint = read_endpoint(model, model=model_name, api_key_env=api_key_env)
        config = load_config(recipe, given, purpose=Purpose.ENDPOINT)
        from psrl.cli.summary import print_evaluation
        from psrl.runtime.endpoint_evaluation import evaluate_endpoint

        print_evaluation(evaluate_endpoint(config, endpoint))
        return
    for flag, value in (("--model-name", model_name), ("--api-key-env", api_key_env)):
        if value is not None:
            fix = "give --model http://HOST:PORT/v1, or leave it out"
            raise ConfigError(key=flag, value=value, rule="is of an API, and --model is no URL", fix=fix)
    if model is not None:
        refuse_address_without_scheme(model)
        given.append(f"train_actor_rollout_ref.model.path={_quoted(Path(model))}")
    config = load_config(recipe, given, purpose=Purpose.VALIDATION)
    from psrl.config.machine import read_machine
    from psrl.config.plan import make_plan

    make_plan(config, read_machine(), with_training=False)
    from psrl.cli.summary import print_evaluation
    from psrl.runtime import evaluation

    print_evaluation(evaluation.evaluate(config))


def _quoted(path: Path) -> str:
    """For Hydra's grammar, in which a path may hold characters that mean something."""
    escaped = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
