"""How sure a rate is that was counted on a few problems."""

from __future__ import annotations

import math

Z_95 = 1.959963984540054
"""The standard normal distribution has 95% of its mass within so many standard deviations."""


def wilson_interval(num_successes: int, num_trials: int, *, z: float = Z_95) -> tuple[float, float]:
    """Confidence interval of a rate: the score interval of E. B. Wilson, "Probable inference, the law of succession, and
    statistical inference", Journal of the American Statistical Association 22 (1927), 209-212.

    With p = num_successes / num_trials and n = num_trials:

        (p + z²/2n ± z sqrt(p(1 - p)/n + z²/4n²)) / (1 + z²/n)

    It stays inside [0, 1] and says something also where all or none succeeded. Without trials nothing is known: (0, 1).

    Example:
        8 of 10, z = 2: p = 0.8, z²/n = 0.4; (0.8 + 0.2 ± 2 sqrt(0.016 + 0.01)) / 1.4 = (0.484, 0.945).
    """
    assert 0 <= num_successes <= num_trials, f"{num_successes} of {num_trials}"
    if num_trials == 0:
        return 0.0, 1.0
    rate, spread = num_successes / num_trials, z * z / num_trials
    middle = rate + spread / 2
    half = z * math.sqrt(rate * (1 - rate) / num_trials + spread / num_trials / 4)
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    return max(0.0, low), min(1.0, high)
