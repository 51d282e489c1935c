"""Tokens per second over the last two seconds, on a clock that the test moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.engines.rate import TokenRate


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_steady_rate_is_seen_after_the_window_and_gone_two_seconds_after_it_ends():
    clock = Clock()
    rate = TokenRate(clock)
    assert rate.per_s() == 0
    for _ in range(300):
        clock.now += 0.01
        rate.add(5)
    assert rate.per_s() == pytest.approx(500, rel=0.03)
    clock.now += 1.0
    assert rate.per_s() == pytest.approx(250, rel=0.15)  # the last second is empty; a quarter of a second is the grain
    clock.now += 1.0
    assert rate.per_s() == 0


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 100)), max_size=40))
def test_it_never_counts_a_token_twice_or_one_older_than_the_window(steps):
    clock, seen = Clock(), []
    rate = TokenRate(clock)
    for seconds, count in steps:
        clock.now += seconds
        rate.add(count)
        seen.append((clock.now, count))
        inside = sum(n for at, n in seen if at > clock.now - 2.0)
        surely_inside = sum(n for at, n in seen if at > clock.now - 1.75)
        assert surely_inside / 2.0 - 1e-9 <= rate.per_s() <= inside / 1.75 + 1e-9
