"""`psrl simulate`: how fast a run would be, on virtual time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psrl.cli.arguments import Overrides, Recipe
from psrl.errors import ConfigError

if TYPE_CHECKING:
    from psrl.config.tree import Config
    from psrl.simulation import SimulationReport, Workload

LATENCY = "such as 2, lognormal:median=2,sigma=1,max=60 or pareto:min=0.1,alpha=1.5,max=30"
Seconds = str | None


def simulate(
    recipe: Recipe,
    overrides: Overrides = None,
    turn: Annotated[Seconds, typer.Option(help=f"Seconds of one turn: {LATENCY}.", metavar="LATENCY")] = None,
    tokens: Annotated[Seconds, typer.Option(help="Tokens of one turn.", metavar="LATENCY")] = None,
    token_s: Annotated[float | None, typer.Option(help="Seconds of a decode step; then --tokens says how long turns are.")] = None,
    token_s_per_sequence: Annotated[float | None, typer.Option(help="Seconds that each sequence adds to a decode step.")] = None,
    turns: Annotated[str | None, typer.Option(help="Turns of an episode: 3, or 1-4 for each with equal chance.", metavar="N-M")] = None,
    tool: Annotated[Seconds, typer.Option(help="Seconds in the environment after each turn but the last.", metavar="LATENCY")] = None,
    reward: Annotated[Seconds, typer.Option(help="Seconds of grading.", metavar="LATENCY")] = None,
    train: Annotated[Seconds, typer.Option(help="Seconds of an update.", metavar="LATENCY")] = None,
    push: Annotated[Seconds, typer.Option(help="Seconds of handing weights to the parameter server.", metavar="LATENCY")] = None,
    rest: Annotated[Seconds, typer.Option(help="Seconds from there until it looks for data again.", metavar="LATENCY")] = None,
    sync: Annotated[Seconds, typer.Option(help="Seconds in which a replica takes weights.", metavar="LATENCY")] = None,
    pause: Annotated[Seconds, typer.Option(help="The part of --sync in which it stands still.", metavar="LATENCY")] = None,
    recompute: Annotated[
        float | None, typer.Option(help="Seconds by which a replica stands still longer for each turn that a sync interrupts (0).")
    ] = None,
    equal_share: Annotated[float | None, typer.Option(help="Share of groups with equal rewards, for filter_groups.")] = None,
    failure_rate: Annotated[
        list[str] | None, typer.Option(help="replica=1/3600, worker=1/7200 (per second) or episode=0.01 (share).", metavar="WHAT=RATE")
    ] = None,
    restart_s: Annotated[float | None, typer.Option(help="Seconds until what died works again (20).")] = None,
    run: Annotated[Path | None, typer.Option("--from", help="Take all of this from a run folder.", metavar="RUN_FOLDER")] = None,
    from_steps: Annotated[str | None, typer.Option(help="Its steps that count; all but the first two.", metavar="N-M")] = None,
    steps: Annotated[int, typer.Option(help="Updates that are measured.", min=1)] = 40,
    warmup: Annotated[int | None, typer.Option(help="Updates before that (staleness + 3).", min=0)] = None,
    sweep: Annotated[list[str] | None, typer.Option(help="One simulation per value.", metavar="KEY=A,B,...")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Simulate a run of RECIPE: throughput, idle shares, staleness. Starts nothing.

    What nobody says of the time that things take is that of the recipe's last run.
    """
    from psrl.cli.simulation_table import print_json, print_report, print_sweep
    from psrl.cli.workload_options import WorkloadOptions, read_workload

    options = WorkloadOptions(
        turn=turn,
        tokens=tokens,
        token_s=token_s,
        token_s_per_sequence=token_s_per_sequence,
        turns=turns,
        tool=tool,
        reward=reward,
        train=train,
        push=push,
        rest=rest,
        sync=sync,
        pause=pause,
        recompute=recompute,
        equal_share=equal_share,
        failure_rate=tuple(failure_rate or ()),
        restart_s=restart_s,
        from_steps=from_steps,
    )
    settings = _settings_of(sweep or [])
    configs = [_config(recipe, [*(overrides or []), *each]) for each in settings]
    if run is None and options.say_nothing:
        run = _last_run(configs[0])
    workload = read_workload(options, run)
    reports = [_simulated(config, workload, steps, warmup) for config in configs]
    if as_json:
        print_json(settings, reports)
    elif len(reports) == 1:
        print_report(reports[0])
    else:
        print_sweep(settings, reports)


def _simulated(config: Config, workload: Workload, steps: int, warmup: int | None) -> SimulationReport:
    from psrl.simulation import SimulatedCluster, simulate

    num_warmup = config.psrl.staleness + 3 if warmup is None else warmup
    return simulate(SimulatedCluster.of(config), workload, num_steps=num_warmup + steps, num_warmup=num_warmup)


def _config(recipe: str, overrides: Sequence[str]) -> Config:
    from psrl.config.load import Purpose, load_config

    return load_config(recipe, overrides, purpose=Purpose.SIMULATION)


def _last_run(config: Config) -> Path:
    from psrl.telemetry.run_folder import RunFolder

    found = RunFolder.latest(Path(config.trainer.default_local_dir), config.recipe)
    if found is None:
        rule = f"nothing says how long things take, and there is no run of {config.recipe} to measure it from"
        raise ConfigError(key="--from", value=None, rule=rule, fix="write --turn lognormal:median=2,sigma=1 --train 3.0, or train first")
    return found.path


def _settings_of(sweep: Sequence[str]) -> list[tuple[str, ...]]:
    """Every combination of the values, as overrides; one without any where nothing is swept."""
    axes = []
    for text in sweep:
        key, equals, values = text.partition("=")
        if not key or not equals or not values:
            rule = "is not of the form KEY=A,B,..."
            raise ConfigError(key="--sweep", value=text, rule=rule, fix="write --sweep psrl.staleness=0,1,2")
        axes.append([f"{key}={value}" for value in values.split(",")])
    return list(itertools.product(*axes))
