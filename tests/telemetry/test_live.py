"""The live view: on a terminal (a real pseudo-terminal) and elsewhere."""

import io
import os
import pty
import select
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from psrl.telemetry import names
from psrl.telemetry.live import SHARE_BAR_WIDTH, LiveDisplay, share_bar, sparkline
from psrl.telemetry.run_folder import RunFolder
from psrl.telemetry.trackers import TrackedRun, open_metric_log

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"
PROGRAM = """
import sys
from psrl.telemetry import names
from psrl.telemetry.live import LiveDisplay
live = LiveDisplay(title="retool_tiny", total_steps=4, model="0.9M")
live.start()
live.validation({names.VAL_GREEDY_ACCURACY: 0.5}, 0)
for step in (1, 2):
    live.step({names.REWARD_MEAN: step / 4, names.STEP_SECONDS: 1.0}, step)
live.activity("generating 96/128 episodes")
live.note("saved [step 2] \\x1b[31m")
live.validation({names.VAL_GREEDY_ACCURACY: 0.75}, 2)
"""


def on_a_terminal(ending):
    """What a program writes to a pseudo-terminal of 100 by 40."""
    parent, child = pty.openpty()
    env = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM + ending], stdout=child, stderr=child, stdin=child, env=env)
    os.close(child)
    written = b""
    while select.select([parent], [], [], 60)[0]:
        try:
            written += os.read(parent, 65536)
        except OSError:  # Linux's end of file on a terminal whose other side has closed
            break
    os.close(parent)
    return process.wait(timeout=60), written.decode()


@pytest.mark.parametrize(("ending", "code"), [("live.stop()", 0), ("raise RuntimeError('boom')", 1), ("sys.exit(3)", 3)])
def test_the_terminal_is_given_back_however_the_program_ends(ending, code):
    returned, written = on_a_terminal(ending)
    assert returned == code
    assert HIDE_CURSOR in written
    assert written.rfind(SHOW_CURSOR) > written.rfind(HIDE_CURSOR)
    for words in ("retool_tiny", "step 2", "/4", "+0.500", "75.0%", "after step 2", "saved [step 2]"):
        assert words in written
    assert "\x1b[31m" not in written  # the note's own escape is not obeyed


def test_without_a_terminal_there_is_one_line_per_step():
    out = io.StringIO()
    with LiveDisplay(title="gsm8k", total_steps=2, model="135M", run_folder=Path("runs/gsm8k/x"), console=Console(file=out)) as live:
        live.activity("generating 1/2 episodes")
        live.step({names.REWARD_MEAN: 0.5}, 1)
        live.validation({names.VAL_GREEDY_ACCURACY: 0.25}, 1)
        live.note("stopping after this step [Ctrl-C]")
    assert out.getvalue().splitlines() == [
        "gsm8k | 135M | 2 steps | runs/gsm8k/x",
        "step   1 | reward +0.500",
        "step   1 | validation | greedy 25.0%",
        "stopping after this step [Ctrl-C]",
    ]


@pytest.mark.parametrize(("width", "height"), [(60, 20), (80, 24), (140, 50)])
def test_the_view_fits_the_screen(width, height):
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=height)
    live = LiveDisplay(title="retool_tiny", total_steps=100, model="0.9M", console=console, run_folder=Path("runs/x/y"))
    shares = {names.time_share(use): 1 / len(names.TimeUse) for use in names.TimeUse}
    for step in range(1, 30):
        live.step({names.REWARD_MEAN: step / 30, names.ACCURACY_MEAN: 0.5, names.TOOL_RATE: 1.0, names.STEP_SECONDS: 1.0, **shares}, step)
    live.validation({names.VAL_GREEDY_ACCURACY: 0.5, names.VAL_MEAN_AT_N_ACCURACY: 0.5}, 29)
    live.activity("training")
    lines = console.render_lines(live._draw(), pad=False)
    assert len(lines) <= height
    assert max(sum(segment.cell_length for segment in line) for line in lines) <= width


def test_the_console_tracker_feeds_the_display_it_is_given(tmp_path):
    out = io.StringIO()
    live = LiveDisplay(title="gsm8k", total_steps=2, console=Console(file=out))
    log = open_metric_log(["console"], TrackedRun(folder=RunFolder(tmp_path), display=live))
    log.log({names.REWARD_MEAN: 0.5, names.VAL_GREEDY_ACCURACY: 0.25}, step=1)
    log.log({names.TRAIN_LOSS: 0.5}, step=1)
    log.close()
    assert out.getvalue().splitlines() == ["step   1 | reward +0.500", "step   1 | validation | greedy 25.0%"]


def test_the_bar_of_shares_has_always_the_same_width():
    for generation in (0.0, 0.01, 0.333, 0.5, 0.97, 1.0):
        shares = {names.time_share(use): 0.0 for use in names.TimeUse}
        shares |= {names.time_share(names.TimeUse.GENERATION): generation, names.time_share(names.TimeUse.IDLE): 1 - generation}
        bar = share_bar(shares).plain
        assert len(bar) == SHARE_BAR_WIDTH
        assert bar.count("▆") == round(generation * SHARE_BAR_WIDTH)


def test_a_sparkline_goes_from_the_lowest_to_the_highest_value():
    assert sparkline([0, 1, 2, 7]) == "▁▂▃█"
    assert sparkline([2.0, 2.0]) == "▄▄"


def test_remaining_time_counts_the_steps_of_this_run_only():
    now = [0.0]
    live = LiveDisplay(title="x", total_steps=20, first_step=10, console=Console(file=io.StringIO(), width=120), clock=lambda: now[0])
    live.start()
    now[0] = 30.0
    live.step({names.REWARD_MEAN: 0.0}, 15)
    # Five steps took 30 s; five are left.
    assert "step 15/20   30.0 s   30.0 s left" in live._progress().plain
