"""`psrl train`: reinforcement learning, or only its plan."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from psrl.cli.arguments import Overrides, Recipe, quoted
from psrl.cli.plans import check_plan, plan_to_show
from psrl.cli.resume_options import settings_of
from psrl.errors import ConfigError


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print settings and plan of processes, start nothing.")] = False,
    from_trajectories: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Train on stored episodes: a run folder, or a file trajectories/*.jsonl; may be repeated."),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the recipe's last run that has a checkpoint.")] = False,
    resume_from: Annotated[Path | None, typer.Option("--resume-from", metavar="RUN", help="Go on with this run folder.")] = None,
) -> None:
    """Train RECIPE by reinforcement learning. Ctrl-C saves and stops."""
    from psrl.config.load import Purpose, load_config, where_runs_lie
    from psrl.config.resume_rules import changed_settings, check_changes

    if resume and resume_from is not None:
        fix = "leave one of them out"
        raise ConfigError(key="--resume-from", value=str(resume_from), rule="says which run to go on with, and so does --resume", fix=fix)
    given = [*(overrides or []), *_overrides_of(from_trajectories or [])]
    if from_trajectories and (resume or resume_from is not None):
        rule, fix = "a resumed run goes on with the trajectories that it was started with", "leave it out"
        raise ConfigError(key="--from-trajectories", value=[str(path) for path in from_trajectories], rule=rule, fix=fix)
    root, name = where_runs_lie(recipe, given)
    run = resume_from or (_last_run(root, name) if resume else None)
    # A run's own settings count, and need not fit the recipe's of today.
    purpose = Purpose.DRY_RUN if dry_run else Purpose.TRAIN
    config = load_config(str(settings_of(run)) if run is not None else recipe, given, purpose=purpose)
    if run is not None:
        check_changes(changed_settings(settings_of(run), config))
    if dry_run:
        from psrl.cli.plan_table import print_dry_run

        print_dry_run(config, plan_to_show(config))
        return
    plan = check_plan(config)
    if plan is not None:
        from psrl.cli.plan_table import print_plan

        print_plan(plan)
    from psrl.cli.summary import print_summary
    from psrl.runtime import controller

    print_summary(controller.train(config, resume_from=run))


def _overrides_of(stored: Sequence[Path]) -> list[str]:
    """The setting that stored trajectories stand for; none where none are named."""
    from psrl.telemetry.trajectories import stored_file

    files = [quoted(stored_file(path, key="--from-trajectories")) for path in stored]
    return [f"data.trajectory_files=[{','.join(files)}]"] if files else []


def _last_run(root: Path, recipe: str) -> Path:
    from psrl.telemetry.run_folder import RunFolder

    found = RunFolder.latest(root, recipe, with_checkpoint=True)
    if found is None:
        rule = f"no run of {recipe} below {root} has a checkpoint"
        raise ConfigError(key="--resume", value=recipe, rule=rule, fix="start without --resume, or name a run with --resume-from RUN")
    return found.path
