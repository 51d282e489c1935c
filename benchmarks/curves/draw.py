"""Curves of several runs of one recipe in one SVG: `python benchmarks/curves/draw.py OUT.svg LABEL=RUN[,RUN...] ...`.

Runs of one label are seeds: their mean is drawn as a line, their range as an area. The panels are the metrics named in `PANELS`.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from html import escape
from pathlib import Path
from statistics import fmean

from psrl.telemetry import names
from psrl.telemetry.metric_log import read_metrics

PANELS = (
    ("validation, mean@4 at temperature 1", names.VAL_MEAN_AT_N_ACCURACY, 1),
    ("validation, greedy", names.VAL_GREEDY_ACCURACY, 1),
    ("training reward (mean of 5 steps)", names.REWARD_MEAN, 5),
    ("KL(rollout, proximal), nats per token (mean of 5 steps)", names.MISMATCH_KL_K3, 5),
)
"""(title, metric, steps averaged)."""
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 440, 230, 46, 24, 26
COLOURS = ("#1b6ca8", "#d1495b", "#2e933c", "#8b5fbf", "#e08e1b", "#555555")
Curve = dict[int, float]


def curve_of(folder: Path, metric: str, window: int) -> Curve:
    """The metric by step; the steps of a window are averaged at its last."""
    values: Curve = {}
    for step, metrics in read_metrics(folder / "metrics.jsonl").items():
        if metric in metrics:
            values[step] = metrics[metric]
    bins: defaultdict[int, list[float]] = defaultdict(list)
    for step, value in values.items():
        bins[-(-step // window) * window].append(value)
    return {step: fmean(values) for step, values in sorted(bins.items())}


def panel(title: str, curves: dict[str, list[Curve]], x: int, y: int) -> str:
    """One framed chart at (x, y)."""
    points = [(step, value) for runs in curves.values() for run in runs for step, value in run.items()]
    if not points:
        return ""
    last, low, high = max(p[0] for p in points), min(p[1] for p in points), max(p[1] for p in points)
    low, high = (0.0 if low >= 0 else low), (1.0 if 0.9 < high <= 1 else high)

    def at(step: float, value: float) -> str:
        share = (value - low) / (high - low or 1.0)
        return f"{x + LEFT + step / last * (WIDTH - LEFT - 14):.1f},{y + HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM):.1f}"

    parts = [f'<text x="{x + LEFT}" y="{y + 16}" font-weight="bold">{escape(title)}</text>']
    for share in (0.0, 0.5, 1.0):
        value = low + share * (high - low)
        left, right = at(0, value), at(last, value)
        label_y = float(left.split(",")[1]) + 4
        parts.append(f'<polyline points="{left} {right}" stroke="#ddd" fill="none"/><text x="{x + 4}" y="{label_y}">{value:.3g}</text>')
    parts += [f'<text x="{at(step, low).split(",")[0]}" y="{y + HEIGHT - 6}" text-anchor="middle">{step}</text>' for step in (0, last)]
    for colour, runs in zip(COLOURS, curves.values(), strict=False):
        steps = sorted(set.intersection(*(set(run) for run in runs)))
        if len(runs) > 1:
            outline = [at(s, max(run[s] for run in runs)) for s in steps] + [at(s, min(run[s] for run in runs)) for s in reversed(steps)]
            parts.append(f'<polygon points="{" ".join(outline)}" fill="{colour}" opacity="0.15"/>')
        line = " ".join(at(s, fmean(run[s] for run in runs)) for s in steps)
        parts.append(f'<polyline points="{line}" stroke="{colour}" stroke-width="1.8" fill="none"/>')
    return "".join(parts)


def main() -> None:
    """Read the runs, write the picture."""
    out, *labelled = sys.argv[1:]
    runs = {text.split("=", 1)[0]: [Path(part) for part in text.split("=", 1)[1].split(",")] for text in labelled}
    body = []
    for index, (title, metric, window) in enumerate(PANELS):
        curves = {label: [curve_of(folder, metric, window) for folder in folders] for label, folders in runs.items()}
        body.append(panel(title, curves, index % 2 * WIDTH, index // 2 * HEIGHT))
    for index, (colour, label) in enumerate(zip(COLOURS, runs, strict=False)):
        x, y = 20 + index % 3 * 2 * WIDTH // 3, 2 * HEIGHT + 18 + index // 3 * 16
        body.append(f'<text x="{x}" y="{y}" fill="{colour}">&#9632; {escape(label)}</text>')
    style = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {2 * HEIGHT + 46}" font-family="sans-serif" font-size="11"'
    Path(out).write_text(f'<svg {style}><rect width="100%" height="100%" fill="white"/>{"".join(body)}</svg>\n')


if __name__ == "__main__":
    main()
