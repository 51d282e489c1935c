"""One line says how far it is: redrawn on a terminal, now and then a line elsewhere."""

import io

from psrl.telemetry import progress
from psrl.telemetry.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_s_line_is_redrawn_and_no_wider_than_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    line = ProgressLine("played", 2, stream=stream)
    line.show("0 resolved, now: " + "name " * 40)
    line.done("1 resolved")
    line.done("2 resolved")
    first, second, third = stream.getvalue().split("\r")[1:]
    assert first.startswith("played 0/2  0 s  0 resolved") and len(first) == 29
    assert second.rstrip() == "played 1/2  0 s  1 resolved" and "\n" not in second
    assert third.rstrip() == "played 2/2  0 s  2 resolved" and third.endswith("\n")


def test_elsewhere_nothing_is_said_twice_a_minute(monkeypatch):
    stream = io.StringIO()
    line = ProgressLine("played", 2, stream=stream)
    line.show("now: a")
    assert stream.getvalue() == ""
    monkeypatch.setattr(progress, "QUIET_S", 0.0)
    line.show("now: a")
    assert stream.getvalue() == "played 0/2  0 s  now: a\n"


def test_elsewhere_about_twenty_lines_are_said_of_many():
    stream = io.StringIO()
    line = ProgressLine("played", 100, stream=stream)
    for _ in range(100):
        line.done("")
    assert len(stream.getvalue().splitlines()) == 20
