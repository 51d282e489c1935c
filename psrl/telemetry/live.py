"""What a user sees while a run trains: one table that is redrawn in place on a terminal, one line per step elsewhere.

Redrawn at most four times a second by rich's thread, from values that `step`, `validation` and `activity` only store. The
terminal is given back by `stop`, by leaving the `with` block, and at the exit of the process whatever ended it.
"""

from __future__ import annotations

import atexit
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.rule import Rule
from rich.segment import SegmentLines
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from psrl.telemetry.console import SHORT_USE, is_off_policy, short_number, short_seconds, step_line, validation_line
from psrl.telemetry.names import (
    ACCURACY_MEAN,
    GENERATION_TOKENS_PER_SECOND,
    REWARD_MEAN,
    STALENESS_VERSION_GAP_MEAN,
    STEP_SECONDS,
    TOOL_RATE,
    TURNS_MEAN,
    TimeUse,
    time_share,
)
from psrl.telemetry.val_accuracy import headline

REDRAWS_PER_SECOND = 4
NUM_ROWS = 12
NUM_OTHER_LINES = 13
"""Lines of the display beside the table's rows."""
SHARE_BAR_WIDTH = 18
SPARKLINE_WIDTH = 48
NARROW_COLUMNS = 84
"""Below this many columns the bar of shares and the number of turns are left out."""
USE_STYLE = {
    TimeUse.GENERATION: "blue",
    TimeUse.TOOLS: "yellow",
    TimeUse.REWARD: "magenta",
    TimeUse.TRAINING: "green",
    TimeUse.SYNC: "cyan",
    TimeUse.SAVING: "bright_cyan",
    TimeUse.VALIDATION: "bright_magenta",
    TimeUse.IDLE: "bright_black",
}
BUSY_CELL, IDLE_CELL = "▆", "·"
"""Not the full block: the bars of two rows must not touch."""
_SPARKS = "▁▂▃▄▅▆▇█"


class LiveDisplay:
    """The live view of one run. Calls are cheap; nothing is drawn by them.

    Given to the `console` tracker as `TrackedRun.display` it receives steps and validations from the metric log; then the owner
    only calls `start`, `activity`, `note` and `stop`.

    Example:
        `with LiveDisplay(title="retool_tiny", total_steps=40) as live: live.activity("generating 96/128 episodes")`
    """

    def __init__(
        self,
        *,
        title: str,
        total_steps: int,
        model: str = "",
        run_folder: Path | None = None,
        first_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            title: The recipe.
            total_steps: Step at which the run ends.
            model: What is trained, in a few words.
            run_folder: Shown in the header.
            first_step: Steps done before (a resumed run); they do not count for the remaining time.
            console: Where to draw; None takes standard output.
            clock: Seconds that never go back.
        """
        self._title, self._model, self._run_folder = title, model, run_folder
        self._total_steps, self._first_step, self._done = total_steps, first_step, first_step
        self._console = console or Console()
        self._clock = clock
        self._started = clock()
        self._rows: deque[tuple[int, dict[str, float]]] = deque(maxlen=NUM_ROWS)
        self._rewards: deque[float] = deque(maxlen=SPARKLINE_WIDTH)
        self._first_validation: tuple[int, dict[str, float]] | None = None
        self._last_validation: tuple[int, dict[str, float]] | None = None
        self._spinner = Spinner("dots", style="cyan")
        self._activity = ""
        self._activity_since = self._started
        self._live: Live | None = None
        self._num_changes = 0
        self._laid_out: tuple[tuple[int, int, int], SegmentLines, SegmentLines] | None = None

    @property
    def is_drawn(self) -> bool:
        """Whether output is a terminal, so that the table is drawn instead of lines."""
        return self._console.is_terminal

    def start(self) -> None:
        """Begin to draw; on no terminal, write the header."""
        self._started = self._activity_since = self._clock()
        if not self.is_drawn:
            where = f" | {self._run_folder}" if self._run_folder else ""
            self._write(f"{self._title} | {self._model or 'model'} | {self._total_steps} steps{where}")
            return
        self._live = Live(console=self._console, get_renderable=self._draw, refresh_per_second=REDRAWS_PER_SECOND, transient=False)
        atexit.register(self.stop)
        self._live.start(refresh=True)

    def activity(self, text: str) -> None:
        """What goes on now, such as "generating 96/128 episodes"; only seen on a terminal."""
        if text.split(" ", 1)[0] != self._activity.split(" ", 1)[0]:
            self._activity_since = self._clock()
        self._activity = text

    def step(self, metrics: Mapping[str, float], step: int) -> None:
        """A training step is done."""
        self._done = step
        self._rows.append((step, dict(metrics)))
        if REWARD_MEAN in metrics:
            self._rewards.append(metrics[REWARD_MEAN])
        self._num_changes += 1
        if not self.is_drawn:
            self._write(step_line(metrics, step))

    def validation(self, metrics: Mapping[str, float], step: int) -> None:
        """A validation is done."""
        self._last_validation = (step, dict(metrics))
        self._first_validation = self._first_validation or self._last_validation
        self._num_changes += 1
        if not self.is_drawn:
            self._write(validation_line(metrics, step))

    def note(self, text: str) -> None:
        """A line for the user to keep: it stays above the table."""
        self._write(text)

    def stop(self) -> None:
        """Draw for the last time and give the terminal back; may be called twice."""
        live, self._live = self._live, None
        if live is not None:
            self._activity = ""
            live.stop()
            atexit.unregister(self.stop)

    def __enter__(self) -> LiveDisplay:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _write(self, text: str) -> None:
        # Notes may hold brackets or what a model wrote: neither markup nor control characters are obeyed.
        safe = "".join(c if c == "\n" or c.isprintable() else " " for c in text)
        self._console.print(Text(safe), soft_wrap=True)

    # ------------------------------------------------------------ drawing (rich's thread; reads only)

    def _draw(self) -> RenderableType:
        header, body = self._unmoved()
        parts: list[RenderableType] = [header, self._progress(), Text(), body]
        if self._activity and self._live is not None:
            self._spinner.update(text=self._activity_text())
            parts += [Text(), self._spinner]
        return Padding(Group(*parts), (1, 1, 0, 1))

    def _unmoved(self) -> tuple[SegmentLines, SegmentLines]:
        """What only changes with a step or the screen's size, laid out once: most of the cost of a drawing."""
        key = (self._num_changes, self._console.width, self._console.height)
        if self._laid_out is None or self._laid_out[0] != key:
            body: list[RenderableType] = [self._steps(), self._legend(), Text()] if self._rows else []
            summary = self._summary()
            if summary.row_count:
                body.append(summary)
            self._laid_out = (key, self._lines_of(self._header()), self._lines_of(Group(*body)))
        return self._laid_out[1:]

    def _lines_of(self, part: RenderableType) -> SegmentLines:
        options = self._console.options.update_width(max(1, self._console.width - 2))
        return SegmentLines(self._console.render_lines(part, options, pad=False), new_lines=True)

    def _header(self) -> RenderableType:
        title = Text.assemble((" psrl ", "bold black on cyan"), " ", (self._title, "bold"))
        if self._model:
            title.append(f"  {self._model}", style="dim")
        lines: list[RenderableType] = [Rule(title, align="left", style="bright_black", characters="─")]
        if self._run_folder:
            lines.append(Text(str(self._run_folder), style="dim", overflow="ellipsis", no_wrap=True))
        return Group(*lines)

    def _progress(self) -> Text:
        width = max(10, min(40, self._console.width - 50))
        share = min(1.0, self._done / self._total_steps) if self._total_steps else 1.0
        full = round(share * width)
        elapsed = self._clock() - self._started
        line = Text.assemble(
            ("━" * full, "cyan"),
            ("━" * (width - full), "bright_black"),
            (f"  step {self._done}", "bold"),
            (f"/{self._total_steps}", "dim"),
            (f"   {short_seconds(elapsed)}", ""),
        )
        steps_here = self._done - self._first_step
        if steps_here > 0 and self._done < self._total_steps:
            # Elapsed time holds start-up and validations too: an honest estimate, a little long in the beginning.
            line.append(f"   {short_seconds(elapsed / steps_here * (self._total_steps - self._done))} left", style="dim")
        line.no_wrap = True
        return line

    def _steps(self) -> Table:
        is_wide = self._console.width >= NARROW_COLUMNS
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
        shows_age = any(is_off_policy(metrics) for _, metrics in self._rows)
        ages = ["age"] if shows_age else []
        for name in ("step", "reward", "accuracy", "tool", *(["turns"] if is_wide else []), *ages, "tok/s", "time"):
            table.add_column(name, justify="right", no_wrap=True)
        if is_wide:
            table.add_column("where the time went", no_wrap=True)
        # A screen that is too low would hide the lines below the table.
        rows = list(self._rows)[-max(3, self._console.height - NUM_OTHER_LINES) :]
        previous: float | None = None
        for index, (step, metrics) in enumerate(rows):
            reward = metrics.get(REWARD_MEAN)
            cells = [
                Text(str(step)),
                _signed(reward, previous),
                _cell(metrics.get(ACCURACY_MEAN), "{:.1%}"),
                _cell(metrics.get(TOOL_RATE), "{:.0%}"),
                *([_cell(metrics.get(TURNS_MEAN), "{:.2f}")] if is_wide else []),
                *([_cell(metrics.get(STALENESS_VERSION_GAP_MEAN), "{:.1f}")] if shows_age else []),
                _cell(metrics.get(GENERATION_TOKENS_PER_SECOND), short_number),
                _cell(metrics.get(STEP_SECONDS), short_seconds),
                *([share_bar(metrics)] if is_wide else []),
            ]
            previous = reward
            table.add_row(*cells, style="bold" if index == len(rows) - 1 else "")
        return table

    def _legend(self) -> Text:
        legend = Text()
        if self._console.width < NARROW_COLUMNS:
            return legend
        for use, label in SHORT_USE.items():
            legend.append("■ ", style=USE_STYLE[use])
            legend.append(f"{label}  ", style="dim")
        legend.rstrip()
        legend.justify = "left"
        return legend

    def _summary(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(no_wrap=True)
        if len(self._rewards) > 1:
            low, high = min(self._rewards), max(self._rewards)
            spark = sparkline(list(self._rewards))
            grid.add_row("reward", Text.assemble((spark, "green"), (f"  {low:+.2f} to {high:+.2f}", "dim")))
        if self._first_validation and self._last_validation:
            first, (step, last) = self._first_validation[1], self._last_validation
            line = Text()
            before = dict(headline(first))
            for label, value in headline(last):
                line.append(f"{label} ", style="dim").append_text(_change(before.get(label), value)).append("    ")
            grid.add_row("validation", line.append(f"after step {step}", style="dim"))
        return grid

    def _activity_text(self) -> Text:
        since = self._clock() - self._activity_since
        return Text.assemble(self._activity, (f"  {short_seconds(since)}" if since >= 1 else "", "dim"))


def share_bar(metrics: Mapping[str, float]) -> Text:
    """The shares of a step's time as one bar of coloured cells.

    Example:
        generation 0.5, training 0.5 -> nine blue cells, then nine green ones.
    """
    bar = Text()
    edge = 0.0
    for use in TimeUse:
        share = metrics.get(time_share(use))
        if share is None:
            continue
        # Cells end where the running sum ends: rounding never makes the bar longer or shorter.
        width = round((edge + share) * SHARE_BAR_WIDTH) - round(edge * SHARE_BAR_WIDTH)
        bar.append((IDLE_CELL if use is TimeUse.IDLE else BUSY_CELL) * width, style=USE_STYLE[use])
        edge += share
    return bar


def sparkline(values: list[float]) -> str:
    """One block per value, from the lowest to the highest of them.

    Example:
        [0, 1, 2, 7] -> "▁▂▃█"
    """
    low, high = min(values), max(values)
    if high == low:
        return _SPARKS[3] * len(values)
    return "".join(_SPARKS[round((value - low) / (high - low) * (len(_SPARKS) - 1))] for value in values)


def _cell(value: float | None, form: str | Callable[[float], str]) -> Text:
    if value is None:
        return Text("–", style="dim")
    return Text(form.format(value) if isinstance(form, str) else form(value))


def _signed(value: float | None, previous: float | None) -> Text:
    cell = _cell(value, "{:+.3f}")
    if value is not None and previous is not None and value != previous:
        cell.stylize("green" if value > previous else "red")
    return cell


def _change(first: float | None, last: float) -> Text:
    if first is None or first == last:
        return Text(f"{last:.1%}", style="bold")
    rose = last > first
    return Text.assemble((f"{first:.1%} ", "dim"), ("↗ " if rose else "↘ ", "green" if rose else "red"), (f"{last:.1%}", "bold"))
