"""Shares of a step's wall time: hand arithmetic, and sums that are always 1."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psrl.telemetry.names import STEP_SECONDS, TimeUse
from psrl.telemetry.spans import TimeShares


class Clock:
    """Seconds that only the test moves."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_step_of_three_seconds_training_and_one_of_nothing_is_three_quarters_training():
    clock = Clock()
    shares = TimeShares(clock)
    with shares.span("training"):
        clock.now += 3
    clock.now += 1
    took = shares.take()
    assert took.seconds == 4
    assert took.shares[TimeUse.TRAINING] == 0.75
    assert took.shares[TimeUse.IDLE] == 0.25
    assert took.metrics()[STEP_SECONDS] == 4
    assert took.metrics()["time/share/training"] == 0.75


def test_spans_that_overlap_share_the_time_equally():
    clock = Clock()
    shares = TimeShares(clock)
    with shares.span(TimeUse.GENERATION):
        clock.now += 2  # generation alone
        with shares.span(TimeUse.GENERATION), shares.span(TimeUse.TOOLS):
            clock.now += 3  # two parts generation, one part tools
    took = shares.take()
    assert took.shares[TimeUse.GENERATION] == pytest.approx(4 / 5)
    assert took.shares[TimeUse.TOOLS] == pytest.approx(1 / 5)


def test_an_open_span_goes_on_in_the_next_step():
    clock = Clock()
    shares = TimeShares(clock)
    with shares.span("sync"):
        clock.now += 1
        assert shares.take().shares[TimeUse.SYNC] == 1.0
        clock.now += 2
    took = shares.take()
    assert (took.seconds, took.shares[TimeUse.SYNC]) == (2, 1.0)


def test_waiting_for_episodes_is_divided_by_what_the_episodes_report():
    clock = Clock()
    shares = TimeShares(clock)
    with shares.span("generation"):
        clock.now += 10
    shares.divide("generation", {TimeUse.GENERATION: 60.0, TimeUse.TOOLS: 30.0, TimeUse.REWARD: 10.0})
    took = shares.take()
    assert (took.shares[TimeUse.GENERATION], took.shares[TimeUse.TOOLS], took.shares[TimeUse.REWARD]) == pytest.approx((0.6, 0.3, 0.1))


def test_a_span_that_ends_in_an_exception_is_closed():
    clock = Clock()
    shares = TimeShares(clock)

    def train():
        with shares.span("training"):
            clock.now += 1
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError):
        train()
    clock.now += 1
    assert shares.take().shares[TimeUse.IDLE] == 0.5


def test_a_step_without_any_time_is_idle():
    assert TimeShares(Clock()).take().shares[TimeUse.IDLE] == 1.0


@given(
    st.lists(
        st.tuples(st.sampled_from(["open", "close", "take", "divide"]), st.sampled_from(list(TimeUse)), st.floats(0, 1e4)), max_size=40
    )
)
def test_shares_add_up_to_one_however_spans_nest_and_overlap(moves):
    clock = Clock()
    shares = TimeShares(clock)
    opened = []
    for move, use, seconds in moves:
        clock.now += seconds
        if move == "open":
            opened.append(shares.span(use))
            opened[-1].__enter__()
        elif move == "close" and opened:
            opened.pop(0).__exit__(None, None, None)
        elif move == "divide":
            shares.divide(use, {TimeUse.TOOLS: seconds, TimeUse.REWARD: 1.0})
        else:
            took = shares.take()
            assert sum(took.shares.values()) == pytest.approx(1.0)
            assert min(took.shares.values()) >= 0
    assert sum(shares.take().shares.values()) == pytest.approx(1.0)
