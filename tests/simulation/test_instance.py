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
    assert served.run() == {"a": 1.0, "b": 3.0}
    assert turn.work == pytest.approx(2.0) and not turn.is_whole


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


def test_an_instance_that_dies_loses_what_ran_and_what_waited():
    served = Served(slots=1)
    turns = [served.submit(name, 1.0) for name in "ab"]
    assert served.instance.die() == turns
    assert served.run() == {}


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
