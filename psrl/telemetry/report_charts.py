"""Charts of the report as inline SVG: lines and stacked areas, drawn without any script or network.

Colours come from the page's style sheet (classes `c0` to `c5`), so one drawing serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 210
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 26
MAX_POINTS = 400
"""Longer curves are thinned to means of neighbours: a run of 10,000 steps must not make a page of megabytes."""
MAX_DOTS = 60

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One curve."""

    label: str
    points: Sequence[Point]
    colour: int = 0
    """Class `c<colour>` of the page."""
    is_dashed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A titled picture of some curves over the training steps."""

    title: str
    series: Sequence[Series]
    note: str = ""
    unit: str = ""
    """`%` shows shares as percent; anything else stands behind the numbers of the legend."""
    low: float | None = None
    high: float | None = None
    """Ends of the vertical axis; None takes them from the curves."""
    is_stacked: bool = False
    """Areas on top of each other instead of lines."""


def chart_html(chart: Chart) -> str:
    """A `<figure>` with title, legend and drawing; empty text where no curve has a point."""
    series = [thinned(line) for line in chart.series if line.points]
    if not series:
        return ""
    legend = "".join(_legend_entry(line, chart) for line in series)
    note = f"<p class=note>{escape(chart.note)}</p>" if chart.note else ""
    drawing = _stacked(series, chart) if chart.is_stacked else _lines(series, chart)
    return f"<figure><figcaption><b>{escape(chart.title)}</b>{note}</figcaption>{drawing}<div class=legend>{legend}</div></figure>"


def thinned(line: Series) -> Series:
    """The curve with at most MAX_POINTS points, each the mean of its neighbours."""
    size = math.ceil(len(line.points) / MAX_POINTS)
    if size <= 1:
        return line
    chunks = [line.points[start : start + size] for start in range(0, len(line.points), size)]
    points = [(chunk[-1][0], sum(y for _, y in chunk) / len(chunk)) for chunk in chunks]
    return Series(label=line.label, points=points, colour=line.colour, is_dashed=line.is_dashed)


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers inside [low, high], about `count` of them.

    Example:
        ticks(0, 1) -> [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]; ticks(0, 37) -> [0, 10, 20, 30]
    """
    span = high - low
    if span <= 0:
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.75)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def number(value: float, unit: str = "") -> str:
    """A number for people: 95.2%, 3.1k, 0.0042, 1.2e-05."""
    if unit == "%":
        return f"{value:.1%}".replace(".0%", "%")
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.3g}M"
    if size >= 1e4:
        return f"{value / 1e3:.3g}k"
    if size == 0 or size >= 1e-3:
        return f"{value:.4g}" if size >= 1000 else f"{value:.3g}"
    return f"{value:.1e}"


def _legend_entry(line: Series, chart: Chart) -> str:
    dash = " dash" if line.is_dashed else ""
    # A curve is read by where it ended, an area by its mean.
    value = sum(y for _, y in line.points) / len(line.points) if chart.is_stacked else line.points[-1][1]
    return f'<span><i class="key c{line.colour}{dash}"></i>{escape(line.label)} <b>{escape(number(value, chart.unit))}</b></span>'


@dataclass(frozen=True, slots=True)
class _Frame:
    """From data to the drawing's coordinates."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        value = min(max(value, self.y_low), self.y_high)
        return HEIGHT - BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)


def _frame(series: Sequence[Series], low: float | None, high: float | None) -> _Frame:
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    y_low, y_high = min(ys), max(ys)
    margin = (y_high - y_low) * 0.06 or abs(y_high) * 0.1 or 1.0
    y_low = y_low - margin if low is None else low
    y_high = y_high + margin if high is None else high
    x_low, x_high = min(xs), max(xs)
    if x_high == x_low:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    return _Frame(x_low, x_high, y_low, y_high)


def _svg(body: str, frame: _Frame, chart: Chart) -> str:
    grid = ""
    for value in ticks(frame.y_low, frame.y_high):
        y = frame.y(value)
        grid += f'<line class=grid x1={LEFT} x2={WIDTH - RIGHT} y1={y:.1f} y2={y:.1f} /><text x={LEFT - 6} y={y + 4:.1f} class="tick end">'
        grid += f"{escape(number(value, chart.unit))}</text>"
    for value in ticks(frame.x_low, frame.x_high):
        if value == int(value):
            x = frame.x(value)
            grid += f'<text x={x:.1f} y={HEIGHT - 8} class="tick mid">{int(value)}</text>'
    label = escape(f"{chart.title} over training steps", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role=img aria-label="{label}">{grid}{body}</svg>'


def _lines(series: Sequence[Series], chart: Chart) -> str:
    frame = _frame(series, chart.low, chart.high)
    body = ""
    for line in series:
        dash = " dash" if line.is_dashed else ""
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in line.points)
        body += f'<polyline class="line c{line.colour}{dash}" points="{path}" />'
        dots = line.points if len(line.points) <= MAX_DOTS else line.points[-1:]
        for x, y in dots:
            tip = escape(f"{line.label}, step {x:g}: {number(y, chart.unit)}")
            body += f'<circle class="dot c{line.colour}" cx={frame.x(x):.1f} cy={frame.y(y):.1f} r=2.2><title>{tip}</title></circle>'
    return _svg(body, frame, chart)


def _stacked(series: Sequence[Series], chart: Chart) -> str:
    """Areas; all series have the same steps."""
    steps = [x for x, _ in series[0].points]
    assert all([x for x, _ in line.points] == steps for line in series), f"{chart.title}: stacked curves need the same steps"
    if len(steps) == 1:
        # One step has no width: drawn as a bar as wide as the chart.
        steps = [steps[0] - 0.5, steps[0] + 0.5]
        series = [
            Series(label=line.label, points=[(steps[0], line.points[0][1]), (steps[1], line.points[0][1])], colour=line.colour)
            for line in series
        ]
    frame = _Frame(steps[0], steps[-1], 0.0, 1.0)
    floor = [0.0] * len(steps)
    body = ""
    for line in series:
        top = [base + y for base, (_, y) in zip(floor, line.points, strict=True)]
        upper = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(steps, top, strict=True)]
        lower = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(steps, floor, strict=True)]
        mean = sum(y for _, y in line.points) / len(line.points)
        tip = escape(f"{line.label}: {number(mean, '%')} on average")
        body += f'<polygon class="area c{line.colour}" points="{" ".join(upper + lower[::-1])}"><title>{tip}</title></polygon>'
        floor = top
    return _svg(body, frame, chart)
