"""One instance on virtual time, against arithmetic done by hand and against queueing theory."""

import random

import pytest

from psrl.simulation.events import EventQueue
from psrl.simulation.instance import Instance, Pace, Turn


class Served:
    """An instance and the times at which its turns ended."""

    def __init__(self, *, slots, pace=None):
        self.events = EventQueue()
        self.instance = Instance(self.events, num_slots=slots, pace=pace or Pace(), version=0)
        self.ended = {}

    def turn(self, name, work, *, priority=0):
        return Turn(work=work, num_tokens=0.0, priority=priority, on_end=lambda turn: self.ended.setdefault(name, self.events.now_s))

    def submit(self, name, work, *, priority=0):
        turn = self.turn(name, work, priority=priority)
        self.instance.submit(turn)
        return turn

    def run(self):
        while self.events.step():
            pass
        return self.ended


def test_what_finds_no_slot_waits_for_one():
    served = Served(slots=2)
    for name in "abc":
        served.submit(name, 1.0)
    assert served.run() == {"a": 1.0, "b": 1.0, "c": 2.0}


def test_the_lower_priority_number_goes_first_and_arrival_decides_among_equals():
    served = Served(slots=1)
    for name, priority in (("running", 9), ("new", 5), ("old", 3), ("old too", 3)):
        served.submit(name, 1.0, priority=priority)
    assert served.run() == {"running": 1.0, "old": 2.0, "old too": 3.0, "new": 4.0}


def test_a_pause_shifts_what_runs_by_its_length():
    served = Served(slots=2)
    served.submit("a", 3.0)
    served.events.after(1.0, served.instance.pause)
    served.events.after(6.0, served.instance.resume)
    assert served.run() == {"a": 8.0}
    assert (served.instance.paused_s, served.instance.busy_slot_s) == (5.0, 8.0)


def test_more_sequences_make_each_decode_step_longer():
    # A step takes 1 + n seconds a token. a: 1 token, b: 2. Both run at 1/3 token a second: a ends at 3, b has one token left,
    # alone at 1/2 token a second: it ends at 5.
    served = Served(slots=2, pace=Pace(base_s=1.0, per_running_s=1.0))
    served.submit("a", 1.0)
    served.submit("b", 2.0)
    assert served.run() == pytest.approx({"a": 3.0, "b": 5.0})


def test_a_turn_that_is_given_back_says_how_much_is_left_and_frees_its_slot():
    served = Served(slots=1)
    turn = served.submit("a", 3.0)
    served.submit("b", 1.0)
    served.events.after(1.0, lambda: served.instance.give_back(turn))
    assert served.run() == {"b": 2.0}
    assert turn.work == pytest.approx(2.0)


def test_a_pause_that_gives_back_ends_all_running_turns_as_they_are():
    served = Served(slots=1)
    turn = served.submit("a", 3.0)
    served.submit("b", 1.0)
    served.events.after(1.0, served.instance.pause_and_give_back)
    served.events.after(2.0, served.instance.resume)
    assert served.run() == {"a": 1.0, "b": 1.0}
    assert turn.work == pytest.approx(2.0) and not turn.is_whole


def test_what_a_pause_gave_back_goes_on_where_it_was_when_it_is_sent_again():
    # One slot, equal priorities: "a" has run for 1 s of 3 when all is given back, and is sent again before "b", which had waited.
    served = Served(slots=1)
    for name, work in (("a", 3.0), ("b", 1.0)):
        turn = served.turn(name, work)

        def ended(turn, name=name):
            if turn.is_whole:
                served.ended[name] = served.events.now_s
            else:
                served.instance.submit(turn)

        turn.on_end = ended
        served.instance.submit(turn)
    served.events.after(1.0, served.instance.pause_and_give_back)
    served.events.after(2.0, served.instance.resume)
    assert served.run() == {"a": 4.0, "b": 5.0}


def test_a_turn_that_comes_again_after_others_does_not_hold_up_their_ends():
    # "a" has 2 of 3 s left when it is given back; sent again at 1.5 it would end at 3.5. "b" ends in its own time before, at 3.2.
    served = Served(slots=2)
    turn = served.submit("a", 3.0)
    served.submit("b", 3.2)
    served.events.after(1.0, lambda: served.instance.give_back(turn))
    served.events.after(1.5, lambda: served.instance.submit(turn))
    assert served.run() == pytest.approx({"b": 3.2, "a": 3.5})


def test_replicas_behind_a_gateway_share_their_turns():
    # Two turns on two replicas: each runs alone, at 1 + 1 seconds a token.
    events = EventQueue()
    instance = Instance(events, num_slots=2, pace=Pace(base_s=1.0, per_running_s=1.0), version=0, num_replicas=2)
    ended = []
    for _ in range(2):
        instance.submit(Turn(work=3.0, num_tokens=0.0, priority=0, on_end=lambda turn: ended.append(events.now_s)))
    while events.step():
        pass
    assert ended == pytest.approx([6.0, 6.0])


def test_tokens_per_second_are_those_of_the_last_two_seconds():
    # Two turns of 1 s and one of 4 s, 10 tokens a second each. At 2 s: 10 + 10 + 20 tokens in 2 s. At 4 s: 20 in 2 s.
    served, rates = Served(slots=3), {}
    for name, work in (("a", 1.0), ("b", 1.0), ("c", 4.0)):
        served.submit(name, work)
    for look in range(1, 9):
        served.events.after(look * 0.5, lambda at_s=look * 0.5: rates.update({at_s: served.instance.load(tokens_per_work=10).tokens_per_s}))
    served.run()
    assert (rates[2.0], rates[4.0]) == pytest.approx((20.0, 10.0))


def test_draining_ends_with_the_last_running_turn_and_starts_none():
    served = Served(slots=2)
    drained = []
    served.submit("a", 1.0)
    served.submit("b", 2.0)
    served.submit("c", 1.0)

    def resume():
        drained.append(served.events.now_s)
        served.instance.resume()

    served.instance.drain(resume)
    assert served.run() == {"a": 1.0, "b": 2.0, "c": 3.0}
    assert drained == [2.0]


def test_an_instance_that_dies_loses_what_its_turns_got_there_and_no_more():
    # "a" came with 2 of its 3 s left, which it still has after it ran for 0.5 s more.
    served = Served(slots=1)
    first = served.submit("a", 3.0)
    served.events.after(1.0, lambda: served.instance.give_back(first))
    served.events.after(1.0, lambda: served.instance.submit(first))
    served.events.after(1.0, lambda: lost.append(served.submit("b", 1.0)))
    lost = []
    served.events.after(1.5, lambda: lost.extend(served.instance.die()))
    assert served.run() == {}
    second = lost.pop(0)
    assert lost == [first, second] and first.work == pytest.approx(2.0)


def test_waiting_is_that_of_an_m_d_1_queue():
    # Pollaczek and Khinchine: the mean wait at load rho with constant service s is s * rho / (2 * (1 - rho)): 0.5 at rho 0.5, s 1.
    served, draw, waits = Served(slots=1), random.Random(4), []

    def arrive(num_left):
        turn = served.turn(num_left, 1.0)
        began = served.events.now_s
        turn.on_end = lambda turn: waits.append(served.events.now_s - began - 1.0)
        served.instance.submit(turn)
        if num_left:
            served.events.after(draw.expovariate(0.5), lambda: arrive(num_left - 1))

    arrive(20_000)
    served.run()
    assert sum(waits) / len(waits) == pytest.approx(0.5, rel=0.05)
