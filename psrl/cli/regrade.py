"""`psrl regrade`: rewards again from stored trajectories."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psrl.cli.arguments import Overrides
from psrl.cli.resume_options import settings_of

if TYPE_CHECKING:
    from psrl.runtime.score_changes import ScoreChanges

KEY = "RUN"
PLAIN_WIDTH = 140
"""Columns where the output is no terminal."""


def regrade(
    run: Annotated[Path, typer.Argument(metavar=KEY, help="A run folder (its train.jsonl), or a file trajectories/*.jsonl of one.")],
    overrides: Overrides = None,
) -> None:
    """Grade RUN's stored episodes by its own settings with KEY=VALUE on top, into a new file beside the old one."""
    from psrl.config.load import Purpose, load_config
    from psrl.telemetry.trajectories import stored_file

    source = stored_file(run, key=KEY).resolve()
    settings = settings_of(source.parent.parent, key=KEY)
    config = load_config(str(settings), overrides or [], purpose=Purpose.REGRADE)
    from psrl.cli.summary import print_summary
    from psrl.runtime import regrade as runtime

    summary = runtime.regrade(config, source)
    print_changes(summary.changes)
    print_summary(summary)


def print_changes(changes: ScoreChanges) -> None:
    """What changed, by data source, and the episodes that changed most."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from psrl.runtime.score_changes import mean_or_none

    # Data sources and uids are as rows have them: "[/INST]" is no style.
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console = Console(highlight=False, markup=False, width=PLAIN_WIDTH)
    table = Table("data source", "episodes", "reward", "accuracy", "up", "down", "judged now", "not judged now", box=SIMPLE_HEAD)
    for source, scores in sorted(changes.by_source.items()):
        pairs = ((scores.rewards_before, scores.rewards_after), (scores.accuracies_before, scores.accuracies_after))
        means = [f"{_number(mean_or_none(before))} -> {_number(mean_or_none(after))}" for before, after in pairs]
        counts = (scores.num_up, scores.num_down, scores.num_judged_now, scores.num_unjudged_now)
        table.add_row(source, str(scores.num_episodes), *means, *map(str, counts))
    console.print(table)
    if changes.largest:
        largest = Table("changed most", "reward", "accuracy", box=SIMPLE_HEAD)
        for change in changes.largest:
            rewards = f"{_number(change.before.reward)} -> {_number(change.after.reward)}"
            accuracies = f"{_number(change.before.accuracy)} -> {_number(change.after.accuracy)}"
            largest.add_row(change.uid, rewards, accuracies)
        console.print(largest)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"
