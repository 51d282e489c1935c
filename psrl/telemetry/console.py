"""The one line per step that tells the story of a run, in plain text."""

from __future__ import annotations

from collections.abc import Mapping

from psrl.telemetry.names import (
    ACCURACY_MEAN,
    ERRORS_NOT_FINITE_COUNT,
    GENERATION_TOKENS_PER_SECOND,
    REWARD_MEAN,
    STALENESS_VERSION_GAP_MAX,
    STALENESS_VERSION_GAP_MEAN,
    STEP_SECONDS,
    TOOL_RATE,
    TURNS_MEAN,
    VAL_GREEDY_ACCURACY,
    VAL_MEAN_AT_N_ACCURACY,
    VAL_SECONDS,
    VAL_TOOL_RATE,
    TimeUse,
    time_share,
)
from psrl.telemetry.val_accuracy import headline

SHORT_USE = {
    TimeUse.GENERATION: "gen",
    TimeUse.TOOLS: "tools",
    TimeUse.REWARD: "reward",
    TimeUse.TRAINING: "train",
    TimeUse.SYNC: "sync",
    TimeUse.SAVING: "save",
    TimeUse.VALIDATION: "val",
    TimeUse.IDLE: "idle",
}


def metrics_lines(metrics: Mapping[str, float], step: int) -> list[str]:
    """No line, the step's line, the validation's line, or both: by what `metrics` holds."""
    lines = []
    if has_training(metrics):
        lines.append(step_line(metrics, step))
    if has_validation(metrics):
        lines.append(validation_line(metrics, step))
    return lines


def has_training(metrics: Mapping[str, float]) -> bool:
    """Whether these are a training step's; a step whose episodes all failed has no reward, but it took time."""
    return REWARD_MEAN in metrics or STEP_SECONDS in metrics


def is_off_policy(metrics: Mapping[str, float]) -> bool:
    """Whether the step trained on data of older weights."""
    return STALENESS_VERSION_GAP_MAX in metrics and metrics[STALENESS_VERSION_GAP_MAX] > 0


def has_validation(metrics: Mapping[str, float]) -> bool:
    """Whether these are a validation's, perhaps beside others."""
    return VAL_GREEDY_ACCURACY in metrics or VAL_MEAN_AT_N_ACCURACY in metrics


def step_line(metrics: Mapping[str, float], step: int) -> str:
    """Example: `step 12 | reward +0.43 | acc 71% | tool 93% | turns 2.0 | age 0.8 (max 1) | 3.1k tok/s | 4.2 s: gen 61% train 30% idle 9%`.

    The age, in policy versions, stands there where data was older than the weights. Shares are the trainer's time: what it did, and
    for what it waited.
    """
    parts = [f"step {step:>3}"]
    for name, text in (
        (REWARD_MEAN, "reward {:+.3f}"),
        (ACCURACY_MEAN, "acc {:.1%}"),
        (TOOL_RATE, "tool {:.0%}"),
        (TURNS_MEAN, "turns {:.2f}"),
    ):
        if name in metrics:
            parts.append(text.format(metrics[name]))
    if is_off_policy(metrics):
        parts.append(f"age {metrics[STALENESS_VERSION_GAP_MEAN]:.1f} (max {metrics[STALENESS_VERSION_GAP_MAX]:.0f})")
    if GENERATION_TOKENS_PER_SECOND in metrics:
        parts.append(f"{short_number(metrics[GENERATION_TOKENS_PER_SECOND])} tok/s")
    if STEP_SECONDS in metrics:
        # Uses below half a percent only make the line longer.
        uses = {label: metrics[time_share(use)] for use, label in SHORT_USE.items() if time_share(use) in metrics}
        shares = " ".join(f"{label} {share:.0%}" for label, share in uses.items() if share >= 0.005)
        parts.append(f"{short_seconds(metrics[STEP_SECONDS])}" + (f": {shares}" if shares else ""))
    if ERRORS_NOT_FINITE_COUNT in metrics:
        parts.append(f"{metrics[ERRORS_NOT_FINITE_COUNT]:.0f} metrics not finite")
    return " | ".join(parts)


def validation_line(metrics: Mapping[str, float], step: int) -> str:
    """Example: `step 12 | validation | greedy 97.0% | mean@n 95.2% | pass@8 99.0% | tool 99% | 3.0 s`; then mean@n by data source."""
    parts = [f"step {step:>3}", "validation"]
    parts += [f"{label} {value:.1%}" for label, value in headline(metrics)]
    if VAL_TOOL_RATE in metrics:
        parts.append(f"tool {metrics[VAL_TOOL_RATE]:.0%}")
    if VAL_SECONDS in metrics:
        parts.append(short_seconds(metrics[VAL_SECONDS]))
    return " | ".join(parts)


def short_number(value: float) -> str:
    """Three significant digits or so: 950, 3.1k, 27k, 1.2M."""
    for limit, divisor, unit in ((1e3, 1.0, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M"), (float("inf"), 1e9, "G")):
        # Rounded first, so that 999.7 becomes 1.0k and not 1000.
        if abs(round(value)) < limit:
            scaled = value / divisor
            return f"{scaled:.0f}{unit}" if not unit or abs(scaled) >= 9.95 else f"{scaled:.1f}{unit}"
    return str(value)


def short_seconds(seconds: float) -> str:
    """Example: 0.42 s, 12.3 s, 4:05, 1:02:03."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
