"""`psrl view`: the episodes of a run folder, to read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psrl.errors import ConfigError


def view(
    run: Annotated[Path, typer.Argument(help="A run folder: runs/<recipe>/<start time>; or a file trajectories/*.jsonl of one.")],
    episode: Annotated[int | None, typer.Option("--episode", "-n", help="Number of the episode to show whole.")] = None,
    validation: Annotated[bool, typer.Option("--val", help="Validation episodes instead of training ones.")] = False,
    step: Annotated[int | None, typer.Option("--step", help="Only episodes of this step.")] = None,
) -> None:
    """List the episodes of RUN, or show one: messages, tokens coloured by mask, rewards."""
    from rich.console import Console

    from psrl.cli.episodes import episode_table, print_episode
    from psrl.telemetry.trajectories import read_trajectories

    path = run if run.is_file() else _file_of(run, validation=validation)
    records = [(number, record) for number, record in enumerate(read_trajectories(path)) if step is None or record.step == step]
    console = Console()
    if episode is None:
        console.print(episode_table(records))
        return
    chosen = [record for number, record in records if number == episode]
    if not chosen:
        numbers = f"{records[0][0]} to {records[-1][0]}" if records else "none"
        raise ConfigError(
            key="--episode", value=episode, rule=f"is not among the episodes shown ({numbers})", fix="leave it out for a list"
        )
    print_episode(console, chosen[0])


def _file_of(run: Path, *, validation: bool) -> Path:
    from psrl.telemetry.run_folder import RunFolder
    from psrl.telemetry.trajectories import TRAIN_FILE, VAL_FILE

    path = RunFolder.open(run).trajectories / (VAL_FILE if validation else TRAIN_FILE)
    if not path.is_file():
        other = "leave --val out" if validation else "add --val for validation episodes"
        raise ConfigError(key="RUN", value=str(run), rule=f"holds no {path.name}", fix=f"{other}, or name another run")
    return path
