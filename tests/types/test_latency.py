"""Latencies: their means by formula and by drawing, and the form in which they are written."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.errors import ConfigError
from psrl.types.latency import Latency

LATENCIES = [
    Latency.constant(0.25),
    Latency.lognormal(median=1.0, sigma=1.0),
    Latency.lognormal(median=0.5, sigma=1.5, max_value=4.0),
    Latency.lognormal(median=2.0, sigma=0.0, max_value=3.0),
    Latency.pareto(min_value=0.1, alpha=3.0),
    Latency.pareto(min_value=0.1, alpha=1.0, max_value=5.0),
    Latency.pareto(min_value=0.1, alpha=0.7, max_value=5.0),
    Latency.empirical((0.1, 0.1, 5.0)),
]


@pytest.mark.parametrize("latency", LATENCIES, ids=str)
def test_the_mean_is_that_of_many_draws(latency):
    rng = random.Random(3)
    draws = [latency.draw(rng) for _ in range(40_000)]
    spread = math.sqrt(sum((value - latency.mean()) ** 2 for value in draws) / len(draws))
    assert sum(draws) / len(draws) == pytest.approx(latency.mean(), abs=5 * spread / math.sqrt(len(draws)) + 1e-12)
    assert max(draws) <= latency.max_value


def test_means_worked_out_by_hand():
    assert Latency.lognormal(median=1.0, sigma=1.0).mean() == pytest.approx(math.exp(0.5))
    assert Latency.pareto(min_value=2.0, alpha=3.0).mean() == pytest.approx(3.0)  # 3 * 2 / (3 - 1)
    # P(X > x) = 1 / x from 1 on; up to e its integral is 1, plus the whole first second.
    assert Latency.pareto(min_value=1.0, alpha=1.0, max_value=math.e).mean() == pytest.approx(2.0)
    assert Latency.pareto(min_value=1.0, alpha=0.5, max_value=4.0).mean() == pytest.approx(3.0)  # 1 + 2 (sqrt 4 - 1)
    assert Latency.pareto(min_value=1.0, alpha=1.0).mean() == math.inf


def test_half_of_the_draws_are_above_the_median_and_the_pareto_tail_is_as_heavy_as_said():
    rng = random.Random(5)
    above = sum(Latency.lognormal(median=0.3, sigma=2.0).draw(rng) > 0.3 for _ in range(10_000))
    assert abs(above - 5000) < 250  # five standard deviations of a binomial count
    beyond = sum(Latency.pareto(min_value=1.0, alpha=2.0).draw(rng) > 10 for _ in range(10_000))
    assert abs(beyond - 100) < 50  # (1 / 10) ** 2


def test_the_same_seed_gives_the_same_draws_and_each_takes_one_number():
    for latency in LATENCIES:
        one, two = random.Random(9), random.Random(9)
        assert latency.draw(one) == latency.draw(two)
        two = random.Random(9)
        two.random()
        assert one.random() == two.random()


positive = st.floats(1e-6, 1e6)


@given(
    st.one_of(
        st.builds(Latency.constant, st.floats(0, 1e6)),
        st.builds(Latency.empirical, st.lists(st.floats(0, 1e6), min_size=1).map(tuple)),
        st.builds(lambda m, s: Latency.lognormal(median=m, sigma=s), positive, positive),
        st.builds(lambda m, a, by: Latency.pareto(min_value=m, alpha=a, max_value=m + by), positive, positive, positive),
    )
)
def test_what_is_written_is_read_back(latency):
    assert Latency.parse(str(latency), key="here") == latency


@pytest.mark.parametrize(
    "text",
    [
        *("", "fast", "-1", "nan", "constant:1", "gamma:a=1,b=2", "empirical:", "empirical:1,x"),
        *("lognormal:median=1", "lognormal:median=0,sigma=1"),
        *("pareto:min=1,alpha", "pareto:min=1,alpha=2,max=0.5", "pareto:min=1,alpha=2,mean=3"),
    ],
)
def test_what_is_no_latency_is_refused_with_the_forms_that_are(text):
    with pytest.raises(ConfigError, match=r"here=.*write '0.5', 'lognormal:"):
        Latency.parse(text, key="here")
