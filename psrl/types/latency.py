"""Distributions of how long something takes: what the scripted engine waits, and what the simulator counts.

A draw depends on nothing but the generator that is given, so the same seed gives the same seconds in every process. Lengths in tokens
are drawn from the same distributions.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from enum import StrEnum
from statistics import NormalDist

from psrl.errors import ConfigError

_NAMES = {
    "constant": (),
    "lognormal": ("median", "sigma", "max"),
    "pareto": ("min", "alpha", "max"),
    "empirical": (),
}
_STANDARD_NORMAL = NormalDist()
FORM = "'0.5', 'lognormal:median=0.5,sigma=1.2,max=30', 'pareto:min=0.1,alpha=1.5,max=30' or 'empirical:0.1,0.2,5'"


class LatencyKind(StrEnum):
    """The shape of a distribution."""

    CONSTANT = "constant"
    LOGNORMAL = "lognormal"
    PARETO = "pareto"
    EMPIRICAL = "empirical"


@dataclass(frozen=True, slots=True)
class Latency:
    """A distribution of seconds (or of anything else that is not negative).

    Example:
        `Latency.lognormal(median=1.0, sigma=1.0)`: half of the draws are above 1, their mean is exp(0.5) = 1.65.
    """

    kind: LatencyKind
    scale: float = 0.0
    """Of `constant` the value, of `lognormal` the median, of `pareto` the smallest value."""
    shape: float = 0.0
    """Of `lognormal` the standard deviation of the logarithm; of `pareto` the tail index: the smaller, the heavier."""
    max_value: float = math.inf
    """What is drawn beyond it counts as this much."""
    values: tuple[float, ...] = ()
    """Of `empirical`: each is drawn with equal chance."""

    @classmethod
    def constant(cls, value: float) -> Latency:
        """Always `value`."""
        return cls(LatencyKind.CONSTANT, scale=value)

    @classmethod
    def lognormal(cls, *, median: float, sigma: float, max_value: float = math.inf) -> Latency:
        """exp of a normal number: `median` is the middle of the draws."""
        return cls(LatencyKind.LOGNORMAL, scale=median, shape=sigma, max_value=max_value)

    @classmethod
    def pareto(cls, *, min_value: float, alpha: float, max_value: float = math.inf) -> Latency:
        """P(draw > x) = (min_value / x) ** alpha; without `max_value` its mean is infinite up to alpha 1."""
        return cls(LatencyKind.PARETO, scale=min_value, shape=alpha, max_value=max_value)

    @classmethod
    def empirical(cls, values: tuple[float, ...]) -> Latency:
        """One of what was seen."""
        return cls(LatencyKind.EMPIRICAL, values=values)

    @classmethod
    def parse(cls, text: str, *, key: str) -> Latency:
        """Read the form that settings and scripts use: a number, or `kind:name=value,...`; `str()` gives it back.

        Example:
            "pareto:min=0.1,alpha=1.5,max=30"; a plain "0.5" is constant.

        Args:
            text: What was written.
            key: Where, for the error.

        Raises:
            ConfigError: It has another form, or values that make no distribution.
        """
        kind, _, rest = text.strip().partition(":")
        try:
            if not rest:
                return cls.constant(float(kind))
            if kind == LatencyKind.EMPIRICAL:
                return cls.empirical(tuple(float(value) for value in rest.split(",")))
            given = {name.strip(): float(value) for name, value in (pair.split("=") for pair in rest.split(","))}
            first, second, last = _NAMES[kind]
            max_value = given.pop(last, math.inf)
            latency = cls(LatencyKind(kind), scale=given.pop(first), shape=given.pop(second), max_value=max_value)
        except (ValueError, KeyError) as error:
            raise ConfigError(key=key, value=text, rule=f"is no latency ({error})", fix=f"write {FORM}") from error
        if given:
            raise ConfigError(key=key, value=text, rule=f"{kind} has no {sorted(given)}", fix=f"write {FORM}")
        return latency

    def __post_init__(self) -> None:
        fits = {
            LatencyKind.CONSTANT: 0 <= self.scale < math.inf,
            LatencyKind.LOGNORMAL: 0 < self.scale < math.inf and 0 <= self.shape < math.inf,
            LatencyKind.PARETO: 0 < self.scale < math.inf and 0 < self.shape < math.inf,
            LatencyKind.EMPIRICAL: bool(self.values) and all(0 <= value < math.inf for value in self.values),
        }
        if not fits[self.kind] or not self.max_value >= self.scale:
            raise ValueError(f"{self.kind} with scale {self.scale}, shape {self.shape}, at most {self.max_value}, values {self.values[:3]}")

    def draw(self, rng: random.Random) -> float:
        """One value; takes one number from `rng`, whatever the kind."""
        number = rng.random()
        match self.kind:
            case LatencyKind.CONSTANT:
                return self.scale
            case LatencyKind.LOGNORMAL:
                return min(self.max_value, self.scale * math.exp(self.shape * _normal_quantile(number)))
            case LatencyKind.PARETO:
                return min(self.max_value, self.scale * math.pow(1.0 - number, -1.0 / self.shape))
            case LatencyKind.EMPIRICAL:
                return self.values[int(number * len(self.values))]

    def mean(self) -> float:
        """What draws amount to on average, `max_value` included; infinite where the tail is too heavy."""
        scale, shape, top = self.scale, self.shape, self.max_value
        match self.kind:
            case LatencyKind.CONSTANT:
                return scale
            case LatencyKind.LOGNORMAL:
                whole = scale * math.exp(shape**2 / 2)
                if top == math.inf or shape == 0:
                    return whole
                # E[min(X, c)] = whole * Phi(z - sigma) + c * (1 - Phi(z)), z = log(c / median) / sigma
                z = math.log(top / scale) / shape
                return whole * _normal_cdf(z - shape) + top * (1 - _normal_cdf(z))
            case LatencyKind.PARETO:
                if top == math.inf:
                    return scale * shape / (shape - 1) if shape > 1 else math.inf
                if shape == 1:
                    return scale * (1 + math.log(top / scale))
                # integral of P(X > x) from 0 to c
                return scale + (scale / (shape - 1)) * (1 - math.pow(scale / top, shape - 1))
            case LatencyKind.EMPIRICAL:
                return sum(self.values) / len(self.values)

    def __str__(self) -> str:
        match self.kind:
            case LatencyKind.CONSTANT:
                return _text_of(self.scale)
            case LatencyKind.EMPIRICAL:
                return "empirical:" + ",".join(map(_text_of, self.values))
        first, second, last = _NAMES[self.kind]
        limit = "" if self.max_value == math.inf else f",{last}={_text_of(self.max_value)}"
        return f"{self.kind}:{first}={_text_of(self.scale)},{second}={_text_of(self.shape)}{limit}"


def _normal_cdf(z: float) -> float:
    return 0.5 * math.erfc(-z / math.sqrt(2))


def _normal_quantile(probability: float) -> float:
    """Inverse of `_normal_cdf`; 0, which a generator may give, counts as its smallest step."""
    return _STANDARD_NORMAL.inv_cdf(min(max(probability, 2.0**-53), 1 - 2.0**-53))


def _text_of(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
