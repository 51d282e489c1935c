"""The run on one page: `report.html`, self-contained and made without network.

Invariant: the page loads nothing and runs only the script of its template (its content policy names that script's hash), and
every text that a model, a dataset or a setting brought is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import islice
from pathlib import Path
from string import Template
from typing import Any

import yaml

from psrl.telemetry.console import SHORT_USE, short_seconds
from psrl.telemetry.metric_log import curve, read_metrics
from psrl.telemetry.names import (
    ACCURACY_MEAN,
    ERRORS_INFRA_RATE,
    GENERATION_TOKENS_PER_SECOND,
    MISMATCH_KL_K3,
    REPLICAS_IDLE_SHARE,
    REWARD_MEAN,
    SAMPLED_TOKENS_MEAN,
    STALENESS_ARRIVED_COUNT,
    STALENESS_IN_FLIGHT_COUNT,
    STALENESS_VERSION_GAP_MAX,
    STALENESS_VERSION_GAP_MEAN,
    STEP_SECONDS,
    TOOL_ERRORS_MEAN,
    TOOL_RATE,
    TRAIN_CLIP_FRACTION,
    TRAIN_ENTROPY,
    TRAIN_GRAD_NORM,
    TRAIN_LOGPROB_GAP_MAX,
    TRAIN_LOGPROB_GAP_MEAN,
    TURNS_MEAN,
    VAL_GREEDY_ACCURACY,
    VAL_MEAN_AT_N_ACCURACY,
    VAL_SECONDS,
    VAL_TOOL_RATE,
    TimeUse,
    time_share,
)
from psrl.telemetry.report_charts import Chart, Series, chart_html, number
from psrl.telemetry.report_episodes import Decode, chosen_episodes, episode_html, safe
from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.trajectories import TRAIN_FILE, VAL_FILE, EpisodeRecord, read_trajectories
from psrl.telemetry.val_accuracy import sampled_accuracies

NUM_TRAIN_EPISODES = 8
NUM_VAL_EPISODES = 4
NUM_CANDIDATES = 256
"""Episodes at each end of a file that are looked at; the middle of a long run is skipped, not held in memory."""
_TEMPLATE = Path(__file__).with_name("report_template.html")
_ARROW = " <span class=arrow>→</span> "


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plot:
    """A chart to draw where its metrics were logged."""

    title: str
    metrics: Sequence[tuple[str, str]]
    """(label, metric name)."""
    unit: str = ""
    low: float | None = None
    high: float | None = None
    note: str = ""
    is_quiet_at_zero: bool = False
    """Said in one line, not drawn, while it is zero at every step."""


_PLOTS = (
    _Plot(title="Validation accuracy", metrics=(("greedy", VAL_GREEDY_ACCURACY), ("mean@n", VAL_MEAN_AT_N_ACCURACY)),
          unit="%", low=0, high=1),
    _Plot(title="Training reward", metrics=(("mean", REWARD_MEAN),), note="mean over the step's judged episodes"),
    _Plot(title="Training accuracy", metrics=(("mean", ACCURACY_MEAN),), unit="%", low=0, high=1),
    _Plot(title="Tool rate", metrics=(("training", TOOL_RATE), ("validation", VAL_TOOL_RATE)), unit="%", low=0, high=1,
          is_quiet_at_zero=True, note="share of episodes that call a tool"),
    _Plot(title="Turns per episode", metrics=(("mean", TURNS_MEAN),)),
    _Plot(title="Failed tool calls per episode", metrics=(("mean", TOOL_ERRORS_MEAN),), low=0, is_quiet_at_zero=True),
    _Plot(title="Response length", metrics=(("mean", SAMPLED_TOKENS_MEAN),), note="sampled tokens per episode"),
    _Plot(title="Generation speed", metrics=(("tokens/s", GENERATION_TOKENS_PER_SECOND),), low=0),
    _Plot(title="Entropy", metrics=(("nats per token", TRAIN_ENTROPY),), low=0),
    _Plot(title="Logprob gap", metrics=(("max", TRAIN_LOGPROB_GAP_MAX), ("mean", TRAIN_LOGPROB_GAP_MEAN)), low=0,
          note="engine against trainer, same token, same weights"),
    _Plot(title="Gradient norm", metrics=(("before clipping", TRAIN_GRAD_NORM),), low=0),
    _Plot(title="Clipped ratio", metrics=(("share of tokens", TRAIN_CLIP_FRACTION),), unit="%", low=0, is_quiet_at_zero=True),
    _Plot(title="Age of trained data", metrics=(("mean", STALENESS_VERSION_GAP_MEAN), ("max", STALENESS_VERSION_GAP_MAX)), low=0,
          is_quiet_at_zero=True, note="policy versions"),
    _Plot(title="Groups under way", metrics=(("in flight", STALENESS_IN_FLIGHT_COUNT), ("arrived", STALENESS_ARRIVED_COUNT)), low=0,
          is_quiet_at_zero=True, note="when the step was done"),
    _Plot(title="Idle replicas", metrics=(("share of looks", REPLICAS_IDLE_SHARE),), unit="%", low=0, high=1, is_quiet_at_zero=True),
    _Plot(title="Off-policy mismatch", metrics=(("KL(rollout, trainer), nats per token", MISMATCH_KL_K3),), low=0,
          note="of the weights at the start of each step"),
    _Plot(title="Infrastructure errors", metrics=(("share of episodes", ERRORS_INFRA_RATE),), unit="%", low=0, is_quiet_at_zero=True),
)  # fmt: skip

_SUMMARY_KEYS = (
    "train_actor_rollout_ref.model.path",
    "gen_actor_rollout_ref.rollout.agent.default_agent_loop",
    "gen_actor_rollout_ref.rollout.agent.env.name",
    "gen_actor_rollout_ref.rollout.multi_turn.max_turns",
    "gen_actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "gen_actor_rollout_ref.rollout.temperature",
    "data.train_files",
    "data.generator.name",
    "data.train_batch_size",
    "psrl.rollout_n",
    "psrl.staleness",
    "algorithm.adv_estimator",
    "algorithm.filter_groups.enable",
    "train_actor_rollout_ref.actor.policy_loss",
    "train_actor_rollout_ref.actor.loss_agg_mode",
    "train_actor_rollout_ref.actor.optim.lr",
    "trainer.total_training_steps",
    "trainer.seed",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """What the page needs of one run."""

    label: str
    folder: RunFolder
    steps: dict[int, dict[str, float]]
    config_text: str

    @property
    def settings(self) -> dict[str, str]:
        return _flat(yaml.safe_load(self.config_text) or {})


def write_report(
    run_folder: RunFolder,
    *,
    compare: RunFolder | None = None,
    decode: Decode | None = None,
    labels: tuple[str, str] | None = None,
) -> Path:
    """Write `report.html` of a run from what lies in its folder; may be called while it runs.

    Args:
        run_folder: The run.
        compare: Another run, drawn into the same charts (the same recipe without its tool, say).
        decode: Ids to text, for episodes that were stored without the text of their tokens.
        labels: What to call the run and the other one; None takes the names of their recipes.

    Returns:
        The page's path.
    """
    folders = [run_folder] if compare is None else [run_folder, compare]
    runs = [_load(folder, label) for folder, label in zip(folders, labels or _labels(folders), strict=False)]
    script = re.search(r"<script>(.*?)</script>", template := _TEMPLATE.read_text(encoding="utf-8"), re.DOTALL)
    assert script, "the template has no script"
    page = Template(template).substitute(
        script_hash=base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode(),
        title=safe(run_folder.recipe),
        subtitle=safe(f"{run_folder.path.name}" + (f" beside {runs[1].label}" if compare else "")),
        headlines="".join(_headline(run, index, is_compared=compare is not None) for index, run in enumerate(runs)),
        charts="".join([*(_plot_html(plot, runs) for plot in _plots(runs)), *(_time_html(run, len(runs) > 1) for run in runs)]),
        quiet=escape(_quiet_line(runs)),
        episodes="".join(_episodes_html(run, decode, len(runs) > 1) for run in runs),
        settings="".join(_settings_html(runs)),
    )
    partial = run_folder.report.with_suffix(".html.partial")
    partial.write_bytes(page.encode("utf-8", errors="replace"))
    partial.replace(run_folder.report)
    return run_folder.report


def _plots(runs: Sequence[_Run]) -> tuple[_Plot, ...]:
    """What every run has, and after validation's accuracy what these say of it beside: pass@k, and data sources."""
    seen = {name: value for run in runs for metrics in run.steps.values() for name, value in metrics.items()}
    sampled = sampled_accuracies(seen)
    of_all = tuple((each.label, each.metric) for each in sampled if each.k and not each.source)
    by_source = tuple((each.label, each.metric) for each in sampled if each.source and not each.k)
    drawn = (("Validation pass@k", of_all), ("Validation accuracy by data source", by_source))
    more = tuple(_Plot(title=title, metrics=metrics, unit="%", low=0, high=1) for title, metrics in drawn if metrics)
    return (_PLOTS[0], *more, *_PLOTS[1:])


def _labels(folders: Sequence[RunFolder]) -> list[str]:
    names = [folder.recipe for folder in folders]
    return names if len(set(names)) == len(names) else [f"{folder.recipe} {folder.path.name}" for folder in folders]


def _load(folder: RunFolder, label: str) -> _Run:
    config_text = folder.config.read_text(encoding="utf-8") if folder.config.exists() else ""
    return _Run(label=label, folder=folder, steps=read_metrics(folder.metrics), config_text=config_text)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value)
    return found


# ---------------------------------------------------------------- headline


def _headline(run: _Run, index: int, *, is_compared: bool) -> str:
    cards = [
        _change_card(run, "Validation accuracy, greedy", VAL_GREEDY_ACCURACY),
        _change_card(run, "Validation accuracy, mean@n", VAL_MEAN_AT_N_ACCURACY),
        _change_card(run, "Tool rate in training", TOOL_RATE),
    ]
    train_steps = curve(run.steps, REWARD_MEAN)
    seconds = sum(value for name in (STEP_SECONDS, VAL_SECONDS) for _, value in curve(run.steps, name))
    cards.append(_card("Training steps", str(int(train_steps[-1][0]) if train_steps else 0), "policy updates"))
    cards.append(_card("Time", short_seconds(seconds), "training and validation, without start-up"))
    name = f'<h2 class=run><i class="key c{index}"></i>{safe(run.label)}</h2>' if is_compared else ""
    return f"{name}<section class=cards>{''.join(cards)}</section>"


def _change_card(run: _Run, title: str, name: str) -> str:
    points = curve(run.steps, name)
    if not points:
        return ""
    (first_step, first), (last_step, last) = points[0], points[-1]
    if len(points) == 1:
        return _card(title, number(last, "%"), f"at step {last_step}")
    best = max(value for _, value in points)
    note = f"step {first_step} to {last_step}" + (f", best {number(best, '%')}" if best > last else "")
    return _card(title, f"<small>{number(first, '%')}</small>{_ARROW}{number(last, '%')}", note)


def _card(title: str, value_html: str, note: str) -> str:
    return f"<div class=card><span>{escape(title)}</span><strong>{value_html}</strong><em>{escape(note)}</em></div>"


# ---------------------------------------------------------------- charts


def _plot_html(plot: _Plot, runs: Sequence[_Run]) -> str:
    series = []
    for run_index, run in enumerate(runs):
        for index, (label, name) in enumerate(plot.metrics):
            # One run: a colour for each metric. Two runs: a colour for each run, the second metric dashed.
            several = len(runs) > 1
            text = (run.label if len(plot.metrics) == 1 else f"{run.label}, {label}") if several else label
            colour, is_dashed = (run_index, index > 0) if several else (index, False)
            series.append(Series(label=text, points=curve(run.steps, name), colour=colour, is_dashed=is_dashed))
    if plot.is_quiet_at_zero and not any(value for line in series for _, value in line.points):
        return ""
    return chart_html(Chart(title=plot.title, series=series, note=plot.note, unit=plot.unit, low=plot.low, high=plot.high))


def _quiet_line(runs: Sequence[_Run]) -> str:
    titles = []
    for plot in _PLOTS:
        values = [value for run in runs for _, name in plot.metrics for _, value in curve(run.steps, name)]
        if plot.is_quiet_at_zero and values and not any(values):
            titles.append(plot.title.lower())
    return f"Zero at every step: {', '.join(titles)}." if titles else ""


def _time_html(run: _Run, is_compared: bool) -> str:
    steps = [step for step, metrics in run.steps.items() if all(time_share(use) in metrics for use in TimeUse)]
    series = [
        Series(label=SHORT_USE[use], points=[(step, run.steps[step][time_share(use)]) for step in steps], colour=index)
        for index, use in enumerate(TimeUse)
    ]
    title = f"Where the time went: {run.label}" if is_compared else "Where the time went"
    return chart_html(Chart(title=title, series=series, note="shares of each step's wall time", unit="%", is_stacked=True))


# ---------------------------------------------------------------- episodes and settings


def _episodes_html(run: _Run, decode: Decode | None, is_compared: bool) -> str:
    chosen = [
        record
        for name, count in ((TRAIN_FILE, NUM_TRAIN_EPISODES), (VAL_FILE, NUM_VAL_EPISODES))
        for record in chosen_episodes(_ends_of(run.folder.trajectories / name), count)
    ]
    if not chosen:
        return ""
    title = f"<h3>{safe(run.label)}</h3>" if is_compared else ""
    # The first one lies open, to show what there is to see.
    return title + "".join(episode_html(record, decode, is_open=index == 0) for index, record in enumerate(chosen))


def _ends_of(path: Path) -> list[EpisodeRecord]:
    records = read_trajectories(path)
    first = list(islice(records, NUM_CANDIDATES))
    return [*first, *deque(records, maxlen=NUM_CANDIDATES)]


def _settings_html(runs: Sequence[_Run]) -> list[str]:
    settings = [run.settings for run in runs]
    if not any(settings):
        return []
    summary = [key for key in _SUMMARY_KEYS if any(key in each and each[key] not in ("None", "[]", "") for each in settings)]
    differing = [key for key in sorted({*settings[0], *settings[-1]}) if len({each.get(key) for each in settings}) > 1]
    keys = [*summary, *(key for key in differing if key not in summary)]
    heads = "".join(f"<th>{safe(run.label)}</th>" for run in runs) if len(runs) > 1 else ""
    rows = "".join(
        f"<tr{' class=differs' if key in differing else ''}><td>{safe(key)}</td>"
        + "".join(f"<td>{safe(each.get(key, '–'))}</td>" for each in settings)
        + "</tr>"
        for key in keys
    )
    table = f"<div class=scroll><table>{f'<tr><th>setting</th>{heads}</tr>' if heads else ''}{rows}</table></div>"
    texts = [
        f"<details class=tokens><summary>config.yaml of {safe(run.label)}</summary><pre>{safe(run.config_text)}</pre></details>"
        for run in runs
    ]
    return [f"<h2>Settings</h2>{table}", *texts]
