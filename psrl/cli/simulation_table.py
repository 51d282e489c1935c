"""What `psrl simulate` prints."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from psrl.simulation import SimulationReport

BAR_CHARACTERS = 30
PLAIN_WIDTH = 140
"""Columns where the output is no terminal."""


def print_report(report: SimulationReport) -> None:
    """One simulation, every figure with what it means."""
    table = Table(box=None, show_header=False, padding=(0, 2))
    tokens = [("tokens per second", f"{report.tokens_per_s:.4g}")] if report.tokens_per_s else []
    down = [("replicas down", f"{report.engines_down:.2%}")] if report.engines_down else []
    rows = [
        ("episodes trained on per second", f"{report.episodes_per_s:.4g}"),
        *tokens,
        ("seconds per update", f"{report.step_s:.4g}"),
        ("bound, whatever the staleness", f"{report.bound_episodes_per_s:.4g} episodes per second, by the {report.bound_by}"),
        ("reached of it", f"{report.bound_share:.1%}"),
        ("engine slots busy", f"{report.engines_busy:.1%}, with what was trained on {report.engines_useful:.1%}"),
        ("engines paused for weights", f"{report.engines_paused:.2%}"),
        *down,
        (
            "trainer",
            f"training {report.trainer_training:.1%}, pushing {report.trainer_pushing:.1%}, waiting for data {report.trainer_waiting:.1%}",
        ),
        ("syncs per update and instance", f"{report.syncs_per_step:.3g}"),
        ("groups", _counted(report.groups) + f"; at the end {report.groups_in_flight} in flight, {report.groups_waiting} waiting"),
        ("episodes", _counted(report.episodes)),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console = _console()
    console.print(table)
    console.print(f"\n  staleness of what was trained on (bound {report.staleness}, mean {report.staleness_mean:.2f})")
    for gap, share in report.staleness_shares.items():
        console.print(f"  {gap:>3}  {'#' * round(share * BAR_CHARACTERS):<{BAR_CHARACTERS}} {share:.1%}")
    console.print(f"\n  {report.num_steps} updates, {report.seconds:.1f} simulated seconds", style="dim")
    _warn_of_late_turns(console, [report])


def print_sweep(settings: Sequence[tuple[str, ...]], reports: Sequence[SimulationReport]) -> None:
    """One line per setting; the ratio is to the first."""
    table = Table(
        "setting", "s/update", "episodes/s", "ratio", "of bound", "bound by", "slots busy", "useful", "trainer busy", "staleness",
        box=SIMPLE_HEAD,
    )  # fmt: skip
    table.columns[0].no_wrap = True
    for column in table.columns[1:]:
        column.justify = "right"
    for setting, report in zip(settings, reports, strict=True):
        table.add_row(
            "\n".join(text.removeprefix("psrl.").removeprefix("gen_actor_rollout_ref.rollout.") for text in setting),
            f"{report.step_s:.3g}",
            f"{report.episodes_per_s:.4g}",
            f"{report.episodes_per_s / reports[0].episodes_per_s:.2f}",
            f"{report.bound_share:.0%}",
            report.bound_by,
            f"{report.engines_busy:.0%}",
            f"{report.engines_useful:.0%}",
            f"{1 - report.trainer_waiting:.0%}",
            f"{report.staleness_mean:.2f}",
        )
    console = _console()
    console.print(table)
    _warn_of_late_turns(console, reports)


def print_json(settings: Sequence[tuple[str, ...]], reports: Sequence[SimulationReport]) -> None:
    """A list with one object per setting."""
    rows = [{"settings": list(setting), **report.as_json()} for setting, report in zip(settings, reports, strict=True)]
    print(json.dumps(_finite(rows), indent=2))


def _warn_of_late_turns(console: Console, reports: Sequence[SimulationReport]) -> None:
    late = [report for report in reports if report.late_turns]
    if late:
        limits = ", ".join(f"{limit:g}" for limit in sorted({report.request_timeout_s for report in late}))
        console.print(
            f"  {max(report.late_turns for report in late)} turns were not answered within "
            f"gen_actor_rollout_ref.rollout.request_timeout_s={limits}: a run cuts such turns, and their episodes fail. Raise it."
        )


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def _finite(value: Any) -> Any:
    """JSON has no infinity: the rate of a part that takes no time is null."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
