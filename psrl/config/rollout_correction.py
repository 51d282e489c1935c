"""`algorithm.rollout_correction`: what is done about data that other weights sampled. Names and meanings are verl's.

`r` is the probability of a sampled token under the training policy over that under the rollout's; docs/off_policy.md has the formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from psrl.errors import ConfigError

KEY = "algorithm.rollout_correction"
IS_LEVELS = ("token", "sequence")
RS_LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
RS_ESTIMATORS = ("k1", "k2", "k3")
RS_OPTIONS = tuple(f"{level}_{k}" for level in RS_LEVELS for k in RS_ESTIMATORS if (level, k) != ("seq_max", "k1"))
"""`seq_max_k1` would bound one side only; verl does not have it either."""


@dataclass(kw_only=True)
class RolloutCorrectionConfig:
    """Importance weights, rejection, veto; all off by default, their metrics are not."""

    rollout_is: str | None = None
    """Truncated importance weights: `token` (each its own r), `sequence` (the product over the trajectory), or null."""
    rollout_is_threshold: str = "2.0"
    """Most that a weight may be, such as 2.0; two numbers such as 0.5_5.0 make weights outside them 0 (IcePop)."""
    rollout_rs: str | None = None
    """Rejection by comma-separated criteria, all of which must hold: `token_k1`, `seq_sum_k1`, `seq_mean_k1`, ..., `seq_max_k3`."""
    rollout_rs_threshold: str | None = None
    """One entry per criterion, or one for all: 0.5_2.0 for k1 (alone, 2.0 means 0.5_2.0), an upper bound for k2 and k3."""
    rollout_token_veto_threshold: float | None = None
    """A trajectory with a token whose r is less, such as 1e-4, is left out whole."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Criterion:
    """One test of `rollout_rs`: what is inside its bounds stays in the loss."""

    level: str
    estimator: str
    lower: float | None
    """Of k1 only."""
    upper: float


def is_bounds(threshold: str) -> tuple[float | None, float]:
    """(lower, upper) of importance weights; lower None caps them, otherwise weights outside are 0.

    Raises:
        ConfigError: Not a number of at least 1, and not two positive ones with 1 between them.

    Example:
        "2.0" -> (None, 2.0); "0.5_5.0" -> (0.5, 5.0)
    """
    key = f"{KEY}.rollout_is_threshold"
    lower, upper = _numbers(key, threshold)
    if upper < 1 or (lower is not None and not 0 < lower <= 1):
        rule = "would change the weight of tokens on which both policies agree, which is 1"
        fix = f"set {key}=2.0, or two numbers with 1 between them, with decimal points: {key}=0.5_5.0"
        raise ConfigError(key=key, value=threshold, rule=rule, fix=fix)
    return lower, upper


def rs_criteria(rollout_rs: str | None, threshold: str | None) -> tuple[Criterion, ...]:
    """The tests of `rollout_rs` with their thresholds; empty without.

    Raises:
        ConfigError: An unknown or repeated criterion, or thresholds that do not fit.

    Example:
        "token_k1,seq_mean_k3" and "2.0,0.01" -> token k1 within 0.5 and 2.0, seq_mean k3 up to 0.01
    """
    if rollout_rs is None:
        return ()
    key, threshold_key = f"{KEY}.rollout_rs", f"{KEY}.rollout_rs_threshold"
    options = [option.strip() for option in rollout_rs.split(",")]
    for option in options:
        if option not in RS_OPTIONS or options.count(option) > 1:
            rule = f"{option!r} is named twice" if option in RS_OPTIONS else f"{option!r} is no criterion"
            raise ConfigError(key=key, value=rollout_rs, rule=rule, fix=f"use each at most once of {', '.join(RS_OPTIONS)}")
    if threshold is None:
        raise ConfigError(key=threshold_key, value=None, rule=f"{key} needs thresholds", fix=f"set {threshold_key}=0.5_2.0")
    texts = [text.strip() for text in threshold.split(",")]
    if len(texts) not in (1, len(options)):
        rule = f"has {len(texts)} entries for the {len(options)} criteria of {key}"
        raise ConfigError(key=threshold_key, value=threshold, rule=rule, fix="give one for all, or one for each")
    if len(texts) == 1:
        texts *= len(options)
    return tuple(_criterion(option, text) for option, text in zip(options, texts, strict=True))


def _criterion(option: str, text: str) -> Criterion:
    key = f"{KEY}.rollout_rs_threshold"
    level, estimator = option.rsplit("_", 1)
    lower, upper = _numbers(key, text)
    if estimator != "k1":
        if lower is not None or upper <= 0:
            raise ConfigError(key=key, value=text, rule=f"{option} has one positive upper bound", fix=f"set {key}=0.01")
        return Criterion(level=level, estimator=estimator, lower=None, upper=upper)
    lower = 1 / upper if lower is None and upper > 0 else lower
    if lower is None or not 0 < lower <= 1 <= upper:
        rule = f"{option} would leave out what both policies agree on, whose ratio is 1"
        raise ConfigError(key=key, value=text, rule=rule, fix=f"give two numbers around 1 with decimal points: {key}=0.5_2.0")
    return Criterion(level=level, estimator=estimator, lower=lower, upper=upper)


def _numbers(key: str, text: str) -> tuple[float | None, float]:
    """(lower, upper) of "lower_upper", (None, upper) of "upper"."""
    try:
        values = [float(part) for part in text.split("_")]
    except ValueError:
        values = []
    if len(values) not in (1, 2) or not all(math.isfinite(value) for value in values):
        rule = "is neither a number nor two numbers joined by _"
        raise ConfigError(key=key, value=text, rule=rule, fix=f"write {key}=2.0 or {key}=0.5_2.0")
    return (None, values[0]) if len(values) == 1 else (values[0], values[1])
