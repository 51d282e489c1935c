"""What validation says of accuracy: greedy, mean@n and pass@k, over all tasks and, where tasks have several, of each data source.

val/mean_at_n/accuracy        val/pass_at_4/accuracy        of all tasks
val/mean_at_n.aime_2024/...   val/pass_at_4.aime_2024/...   of one source; `openai/gsm8k` is written `openai.gsm8k`
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from psrl.telemetry.names import VAL_GREEDY_ACCURACY, VAL_MEAN_AT_N_ACCURACY

_ACCURACY = re.compile(r"val/(?:mean_at_n|pass_at_(\d+))(?:\.(.+))?/accuracy")
_NOT_OF_NAMES = re.compile(r"[^A-Za-z0-9_.@-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """A logged mean@n or pass@k."""

    metric: str
    value: float
    k: int
    """Of pass@k; 0: mean@n."""
    source: str
    """Empty: of all tasks."""

    @property
    def label(self) -> str:
        """Example: `mean@n`, `aime_2024 pass@2`."""
        return f"{self.source} {f'pass@{self.k}' if self.k else 'mean@n'}".strip()


def mean_at_n(source: str | None = None) -> str:
    """Metric of the mean accuracy of `rollout.n` episodes a task; None: of all tasks."""
    return VAL_MEAN_AT_N_ACCURACY if source is None else f"val/mean_at_n{_suffix(source)}/accuracy"


def pass_at(k: int, source: str | None = None) -> str:
    """Metric of the probability that one of k episodes solves the task; None: of all tasks."""
    return f"val/pass_at_{k}{'' if source is None else _suffix(source)}/accuracy"


def sampled_accuracies(metrics: Mapping[str, float]) -> list[Accuracy]:
    """All that are there but the greedy one: of all tasks first, then by data source; mean@n, then by k."""
    found = [
        Accuracy(metric=name, value=value, k=int(match[1] or 0), source=match[2] or "")
        for name, value in metrics.items()
        if (match := _ACCURACY.fullmatch(name)) is not None
    ]
    return sorted(found, key=lambda each: (each.source, each.k))


def labelled_accuracies(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """(label, value) of each accuracy that is there: the greedy one, then as `sampled_accuracies`.

    Example:
        [("greedy", 0.4), ("mean@n", 0.5), ("pass@2", 0.6), ("aime_2024 mean@n", 0.5), ("aime_2024 pass@2", 0.6), ...]
    """
    return _greedy(metrics) + [(each.label, each.value) for each in sampled_accuracies(metrics)]


def headline(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """As many of `labelled_accuracies` as a line has room for: of pass@k only the largest k; of a source only mean@n."""
    found = sampled_accuracies(metrics)
    largest = max((each.k for each in found), default=0)
    return _greedy(metrics) + [(each.label, each.value) for each in found if each.k in (0, 0 if each.source else largest)]


def _greedy(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    return [("greedy", metrics[VAL_GREEDY_ACCURACY])] if VAL_GREEDY_ACCURACY in metrics else []


def _suffix(source: str) -> str:
    return "." + _NOT_OF_NAMES.sub(".", source)
