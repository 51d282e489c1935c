"""Runs `psrl` as a user does and watches what it starts."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

START_LIMIT_S = 180.0
POLL_S = 0.2


@dataclass
class Command:
    """A running `psrl` command and every process it ever had."""

    process: subprocess.Popen
    folder: Path
    seen: dict[int, psutil.Process] = field(default_factory=dict)

    def look(self) -> list[psutil.Process]:
        """All descendants that live now."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        self.seen.update({child.pid: child for child in children})
        return children

    def descendant(self, *words: str) -> psutil.Process:
        """The one whose command line holds all words."""
        for child in self.look():
            try:
                line = " ".join(child.cmdline())
            except psutil.Error:
                continue
            if all(word in line for word in words):
                return child
        raise AssertionError(f"no process with {words} among {[c.name() for c in self.look()]}")

    def metrics(self) -> dict[int, dict[str, float]]:
        """Metrics by step, of the newest run folder."""
        runs = sorted(self.folder.glob("*/*/metrics.jsonl"))
        steps: dict[int, dict[str, float]] = {}
        for line in runs[-1].read_text().splitlines() if runs else []:
            entry = json.loads(line)
            if "step" in entry:
                steps.setdefault(entry["step"], {}).update(entry["metrics"])
        return steps

    def wait_for_step(self, step: int) -> None:
        """Until the step's metrics are there."""
        deadline = time.monotonic() + START_LIMIT_S
        while step not in self.metrics() or "train/loss/value" not in self.metrics()[step]:
            assert self.process.poll() is None, f"ended early: {self.output()}"
            assert time.monotonic() < deadline, f"step {step} did not come: {self.log()}"
            self.look()
            time.sleep(POLL_S)

    def log(self) -> str:
        """What it printed so far."""
        return (self.folder / "output.txt").read_text()[-4000:]

    def output(self, timeout_s: float = 120.0) -> str:
        """Wait for the end; what it printed."""
        self.process.wait(timeout_s)
        return self.log()

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def leftovers(self, limit_s: float = 20.0) -> list[str]:
        """Processes that still live `limit_s` after the end."""
        _, alive = psutil.wait_procs(list(self.seen.values()), timeout=limit_s)
        return [" ".join(process.cmdline())[:200] for process in alive]


def start(folder: Path, *arguments: str) -> Command:
    """Start `psrl ARGUMENTS` with its run folders below `folder`."""
    folder.mkdir(exist_ok=True)
    with (folder / "output.txt").open("ab") as output:
        process = subprocess.Popen([sys.executable, "-m", "psrl", *arguments], stdout=output, stderr=subprocess.STDOUT)
    return Command(process, folder)
