"""What a finished command reports: the fields of its summary, one a line; of patches also how many resolved their problem."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from psrl.runtime.evaluation import EvalSummary
    from psrl.runtime.swe_results import SweSummary

MAX_REPOS = 20
"""Rows of the table; all of them are in results.json."""


def print_summary(summary: Any) -> None:
    """Print a summary dataclass; fields that are None or summaries themselves are left out."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")  # a path is there to be copied
    for name in (field.name for field in dataclasses.fields(summary)):
        value = getattr(summary, name)
        if value is not None and not dataclasses.is_dataclass(value) and not isinstance(value, tuple):
            table.add_row(name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else str(value))
    Console(soft_wrap=True, markup=False).print(table)


def print_evaluation(summary: EvalSummary) -> None:
    """A validation; where its tasks end with a patch, that comes last, since it is what was asked for."""
    print_summary(summary)
    _print_accuracies(summary.accuracies)
    if summary.swe is not None:
        _print_swe(summary.swe)


def _print_accuracies(accuracies: Sequence[tuple[str, float]]) -> None:
    """Beyond the greedy one and mean@n, which stand in the summary."""
    table = Table.grid(padding=(0, 2))
    for label, value in accuracies:
        if label not in ("greedy", "mean@n"):
            table.add_row(label, f"{value:.4g}")
    if table.row_count:
        Console(soft_wrap=True, markup=False).print(table)


def _print_swe(swe: SweSummary) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"resolved {swe.num_resolved} of {swe.num_problems}: {swe.resolve_rate:.1%}"
        f" (95% confidence interval {swe.low:.1%} to {swe.high:.1%}, Wilson)"
    )
    lines = {
        "outcomes": _counted(swe.outcomes),
        "the agent said": _counted(swe.exit_statuses),
        "turns, mean": "unknown" if swe.mean_turns is None else f"{swe.mean_turns:.1f}",
        "sampled tokens": "unknown (the endpoint's)" if swe.num_sampled is None else str(swe.num_sampled),
        "seconds per episode, mean": f"{swe.mean_episode_s:.1f}",
    }
    table = Table.grid(padding=(0, 2))
    for name, value in lines.items():
        table.add_row(name, value)
    console.print(table)
    console.print(f"predictions, in SWE-bench's format: {swe.predictions}")
    if len(swe.by_repo) > 1:
        repos = Table("repository", "resolved", "problems", box=SIMPLE_HEAD)
        for repo, (num_resolved, num_problems) in list(swe.by_repo.items())[:MAX_REPOS]:
            repos.add_row(repo, str(num_resolved), str(num_problems))
        console.print(repos)
        if len(swe.by_repo) > MAX_REPOS:
            console.print(f"and {len(swe.by_repo) - MAX_REPOS} more repositories")


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())
