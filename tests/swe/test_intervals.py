"""Wilson's interval, beside published figures."""

import pytest

from psrl.swe.intervals import wilson_interval


@pytest.mark.parametrize(
    ("num_successes", "num_trials", "low", "high"),
    # R. G. Newcombe, Statistics in Medicine 17 (1998) 857-872, Table I, method 3 (score, no continuity correction).
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_the_interval_is_that_of_the_literature(num_successes, num_trials, low, high):
    assert wilson_interval(num_successes, num_trials) == pytest.approx((low, high), abs=5e-5)


def test_the_interval_by_hand():
    # z = 2, 8 of 10: z²/n = 0.4; (0.8 + 0.2 ± 2 sqrt(0.016 + 0.01)) / 1.4 with sqrt(0.026) = 0.161245.
    assert wilson_interval(8, 10, z=2) == pytest.approx((0.677510 / 1.4, 1.322490 / 1.4), abs=1e-5)


def test_all_and_none_mirror_each_other_and_no_trial_says_nothing():
    low, high = wilson_interval(0, 7)
    assert wilson_interval(7, 7) == pytest.approx((1 - high, 1 - low))
    assert wilson_interval(0, 0) == (0.0, 1.0)
