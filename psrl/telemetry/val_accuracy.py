"""What validation says of accuracy: greedy, mean@n and pass@k, over all tasks and, where tasks have several, of each data source.

val/mean_at_n/accuracy        val/pass_at_4/accuracy        of all tasks
val/mean_at_n.aime_2024/...   val/pass_at_4.aime_2024/...   of one source; `openai/gsm8k` is written `openai.gsm8k`
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from psrl.telemetry.names import VAL_GREEDY_ACCURACY, VAL_MEAN_AT_N_ACCURACY

_ACCURACY = re.compile(r"val/(?:(mean)_at_n|pass_at_(\d+))(?:\.(.+))?/accuracy")
_NOT_OF_NAMES = re.compile(r"[^A-Za-z0-9_.@-]+")


def mean_at_n(source: str | None = None) -> str:
    """Metric of the mean accuracy of `rollout.n` episodes a task; None: of all tasks."""
    return VAL_MEAN_AT_N_ACCURACY if source is None else f"val/mean_at_n{_suffix(source)}/accuracy"


def pass_at(k: int, source: str | None = None) -> str:
    """Metric of the probability that one of k episodes solves the task; None: of all tasks."""
    return f"val/pass_at_{k}{'' if source is None else _suffix(source)}/accuracy"


def labelled_accuracies(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """(label, value) of each accuracy that is there: of all tasks first, then by data source.

    Example:
        [("greedy", 0.4), ("mean@n", 0.5), ("pass@2", 0.6), ("aime_2024 mean@n", 0.5), ("aime_2024 pass@2", 0.6), ...]
    """
    found: list[tuple[str, bool, int, str, float]] = []
    for name, value in metrics.items():
        match = _ACCURACY.fullmatch(name)
        if match is None:
            continue
        k, source = int(match[2] or 0), match[3] or ""
        label = f"{source} {f'pass@{k}' if k else 'mean@n'}".strip()
        found.append((source, not match[1], k, label, value))
    own = [("greedy", metrics[VAL_GREEDY_ACCURACY])] if VAL_GREEDY_ACCURACY in metrics else []
    return own + [(label, value) for *_, label, value in sorted(found)]


def names_of_labels(metrics: Mapping[str, float]) -> dict[str, str]:
    """Label -> metric, of every accuracy but the greedy one; in the order of `labelled_accuracies`."""
    by_label = {dict(labelled_accuracies({name: value})).popitem()[0]: name for name, value in metrics.items() if _ACCURACY.fullmatch(name)}
    return {label: by_label[label] for label, _ in labelled_accuracies(metrics) if label in by_label}


def headline(metrics: Mapping[str, float]) -> list[tuple[str, float]]:
    """As many of `labelled_accuracies` as a line has room for: of pass@k only the largest k; of a source only mean@n."""
    found = labelled_accuracies(metrics)
    largest = max((_k_of(label) for label, _ in found), default=0)
    return [(label, value) for label, value in found if _k_of(label) == (0 if " " in label else _k_of(label) and largest)]


def _k_of(label: str) -> int:
    return int(label.rpartition("pass@")[2]) if "pass@" in label else 0


def _suffix(source: str) -> str:
    return "." + _NOT_OF_NAMES.sub(".", source)
