"""Metrics of a run: checked once, handed to every tracker, read back from `metrics.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from psrl.protocols import Tracker
from psrl.telemetry.json_lines import read_json_lines
from psrl.telemetry.names import ERRORS_NOT_FINITE_COUNT, is_metric_name


class MetricLog:
    """Hands the metrics of each step to all trackers."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def log(self, metrics: Mapping[str, float], *, step: int) -> dict[str, float]:
        """Log what is finite; may be called several times for one step.

        Returns:
            What was logged. NaN and infinities are left out (no tracker draws them alike) and counted in
            `errors/not_finite_metrics/count`.
        """
        wrong = [name for name in metrics if not is_metric_name(name)]
        assert not wrong, f"metric names are area/noun/stat or env/...: {wrong}"
        finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
        if len(finite) < len(metrics):
            finite[ERRORS_NOT_FINITE_COUNT] = float(len(metrics) - len(finite))
        for tracker in self._trackers:
            tracker.log(finite, step=step)
        return finite

    def close(self) -> None:
        """Close all trackers."""
        for tracker in self._trackers:
            tracker.close()


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Metrics by step, in the order of steps; lines of one step are merged, the later wins."""
    steps: dict[int, dict[str, float]] = {}
    for line in read_json_lines(path):
        steps.setdefault(line["step"], {}).update(line["metrics"])
    return dict(sorted(steps.items()))


def curve(steps: Mapping[int, Mapping[str, float]], name: str) -> list[tuple[int, float]]:
    """(step, value) of one metric, where it was logged."""
    return [(step, metrics[name]) for step, metrics in steps.items() if name in metrics]
