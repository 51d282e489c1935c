"""`psrl rollout`: trajectories without training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psrl.cli.arguments import Overrides, Recipe
from psrl.cli.model_options import ApiKeyEnv, Model, ModelName, endpoint_of, overrides_of
from psrl.cli.plans import check_plan
from psrl.cli.resume_options import settings_of
from psrl.config.endpoint import Endpoint, read_endpoint
from psrl.errors import ConfigError


def rollout(
    recipe: Recipe,
    overrides: Overrides = None,
    model: Model = None,
    model_name: ModelName = None,
    api_key_env: ApiKeyEnv = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the recipe's last rollout.")] = False,
    resume_from: Annotated[Path | None, typer.Option("--resume-from", metavar="RUN", help="Go on with this run folder.")] = None,
) -> None:
    """Play RECIPE's training tasks, psrl.rollout_n episodes each, and store every episode whole. Ctrl-C keeps what has ended."""
    from psrl.config.load import Purpose, load_config, where_runs_lie

    if resume and resume_from is not None:
        rule = "says which rollout to go on with, and so does --resume"
        raise ConfigError(key="--resume-from", value=str(resume_from), rule=rule, fix="leave one of them out")
    run = resume_from or (_last_rollout(*where_runs_lie(recipe, overrides or [])) if resume else None)
    endpoint = endpoint_of(model, model_name, api_key_env)
    if run is not None and model is None:
        endpoint = _endpoint_of_run(run)
    given = [*(overrides or []), *(overrides_of(model) if endpoint is None else [])]
    purpose = Purpose.ROLLOUT if endpoint is None else Purpose.ENDPOINT_ROLLOUT
    config = load_config(recipe if run is None else str(settings_of(run)), given, purpose=purpose)
    from psrl.cli.summary import print_summary

    if endpoint is not None:
        from psrl.runtime.rollout import rollout_at_endpoint

        print_summary(rollout_at_endpoint(config, endpoint, resume_from=run))
        return
    check_plan(config, with_training=False)
    from psrl.runtime import rollout as runtime

    print_summary(runtime.rollout(config, resume_from=run))


def _endpoint_of_run(run: Path) -> Endpoint | None:
    """Where the rollout played; None: at psrl's own engines."""
    from psrl.telemetry.rollout_origin import RolloutOrigin

    origin = RolloutOrigin.read(run)
    return None if origin.url is None else read_endpoint(origin.url, model=origin.model, api_key_env=origin.key_variable)


def _last_rollout(root: Path, recipe: str) -> Path:
    from psrl.telemetry.run_folder import RunFolder

    runs = [each for each in RunFolder.all(root, recipe) if each.rollout.is_file()]
    if not runs:
        rule = f"there is no rollout of {recipe} below {root}"
        raise ConfigError(key="--resume", value=recipe, rule=rule, fix="start without --resume, or name one with --resume-from RUN")
    return runs[-1].path
