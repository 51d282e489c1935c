"""A real `psrl train` that faults are put into: started, watched, gone on with, and held against what it must have kept."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from psrl.datasets.source import uids_given
from psrl.runtime.recovery import newest_whole_checkpoint
from psrl.sandbox.reaper import find_leftovers
from psrl.telemetry.errors_log import ErrorRecord, read_errors
from psrl.telemetry.group_log import check_group_log, read_group_log
from psrl.telemetry.metric_log import read_metrics
from psrl.telemetry.run_folder import RunFolder
from tests.runtime.command import Command, start

NUM_INJECTIONS = int(os.environ.get("PSRL_INJECTIONS", "20"))
"""Of each kind."""
SEED = int(os.environ.get("PSRL_FAULT_SEED", "0"))
"""Of the moments."""
STOP_LIMIT_S = 60.0
"""A run that a fault ends has ended by then."""
RECOVERY_LIMIT_S = 120.0
"""Of a process that is started again, on a busy machine."""
END_LIMIT_S = 240.0
POLL_S = 0.05
STALENESS, GROUPS_PER_STEP = 1, 4
SMALL = (
    "data.generator.num_val=4",
    f"data.train_batch_size={GROUPS_PER_STEP}",
    "psrl.rollout_n=4",
    f"psrl.staleness={STALENESS}",
    "train_actor_rollout_ref.rollout.n=1",
    "trainer.test_freq=0",
    "trainer.val_before_train=false",
    "trainer.total_training_steps=5000",
)
WITHOUT_END = ("psrl.restarts.max_restarts=100000", "psrl.max_episode_retries=10")


@dataclass
class FaultyRun:
    """One run folder, through the commands that make it."""

    folder: Path
    kind: str
    recipe: str = "retool_tiny"
    settings: tuple[str, ...] = ()
    runs: Path | None = None
    """Where its run folders lie; None: in `folder`."""
    command: Command | None = None
    random: random.Random = field(init=False)
    shm_before: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(f"{SEED}/{self.kind}")
        self.shm_before = shared_memory()

    # ------------------------------------------------------------ the command

    def begin(self) -> None:
        """Start it; returns after its first step."""
        self.command = start(self.folder, "train", self.recipe, *self._overrides())
        self.until_steps(1)

    def go_on(self, *more: str) -> None:
        """Resume it, with some settings changed."""
        self.command = start(self.folder, "train", self.recipe, "--resume", *self._overrides(), *more)

    def _overrides(self) -> tuple[str, ...]:
        return (*SMALL, f"trainer.default_local_dir={self.runs or self.folder}", *self.settings)

    @property
    def now(self) -> Command:
        """The command that runs, or ran last."""
        assert self.command is not None, "begin() comes first"
        return self.command

    def metrics(self) -> dict[int, dict[str, float]]:
        """By step, of the run folder."""
        return read_metrics(self.run_folder.metrics) if RunFolder.latest(self.runs or self.folder, self.recipe_name) else {}

    def num_steps(self) -> int:
        """Training steps that stand in the metrics."""
        return max((step for step, metrics in self.metrics().items() if "train/loss/value" in metrics), default=0)

    def until_steps(self, more: int) -> None:
        """Until the run did `more` steps from here on."""
        aim, deadline = self.num_steps() + more, time.monotonic() + END_LIMIT_S
        while self.num_steps() < aim:
            assert self.now.process.poll() is None, f"ended early: {self.now.log()}"
            assert time.monotonic() < deadline, f"step {aim} did not come: {self.now.log()}"
            self.now.look()
            time.sleep(POLL_S)

    def moment(self, longest_s: float) -> float:
        """Let a random time pass; how long it was."""
        pause_s = self.random.uniform(0, longest_s)
        until = time.monotonic() + pause_s
        while time.monotonic() < until:
            self.now.look()
            time.sleep(min(POLL_S, max(0.0, until - time.monotonic())))
        return pause_s

    def alive(self, words: tuple[str, ...]) -> list[psutil.Process]:
        """Descendants whose name or command line holds one of the words, but for those that a fault has stopped."""
        found = []
        for child in self.now.look():
            try:
                line = f"{child.name()} {' '.join(child.cmdline())}"
                if child.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED) and any(word in line for word in words):
                    found.append(child)
            except psutil.Error:
                continue
        return found

    def until_alive(self, words: tuple[str, ...]) -> psutil.Process:
        """One of them at random, once there is one."""
        deadline = time.monotonic() + RECOVERY_LIMIT_S
        while not (found := self.alive(words)):
            assert self.now.process.poll() is None, f"ended early: {self.now.log()}"
            assert time.monotonic() < deadline, f"no {words}: {self.now.log()}"
            time.sleep(POLL_S)
        return self.random.choice(found)

    # ------------------------------------------------------------ what it left

    @property
    def run_folder(self) -> RunFolder:
        """Of the run."""
        found = RunFolder.latest(self.runs or self.folder, self.recipe_name)
        assert found is not None, "the run made no folder"
        return found

    @property
    def recipe_name(self) -> str:
        """As its folder is called."""
        return Path(self.recipe).stem

    def errors(self) -> list[ErrorRecord]:
        """Of the run so far."""
        return list(read_errors(self.run_folder.errors))

    def num_deaths(self, unit: str) -> int:
        """How often `unit` was started again."""
        return sum(error.unit.startswith(unit) for error in self.errors())

    def num_recoveries(self, unit: str) -> int:
        """How often the output says that it is up again."""
        lines = (self.folder / "output.txt").read_text(errors="replace").splitlines()
        return sum(line.startswith(unit) and line.rstrip().endswith("is up again") for line in lines)

    def until_recovered(self, unit: str) -> None:
        """Until the output says that it is up again."""
        deadline = time.monotonic() + RECOVERY_LIMIT_S
        while not self.num_recoveries(unit):
            assert self.now.process.poll() is None, f"ended early: {self.now.log()}"
            assert time.monotonic() < deadline, f"{unit} does not come up: {self.now.log()}"
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Ctrl-C: it saves and ends well, and nothing is left."""
        self.now.interrupt()
        self.now.output(END_LIMIT_S)
        assert self.now.process.returncode == 0, self.now.log()
        self.check_nothing_is_left()

    def finish(self) -> None:
        """Go on from the last checkpoint for two more steps, to the end."""
        self.go_on(f"trainer.total_training_steps={max(2, self.num_steps()) + 2}")
        output = self.now.output(END_LIMIT_S)
        assert self.now.process.returncode == 0, output
        self.check_nothing_is_left()

    def check_nothing_is_left(self) -> None:
        """No process, sandbox or shared memory of the run."""
        leftovers = self.now.leftovers()
        assert leftovers == [], leftovers
        deadline = time.monotonic() + 20
        while (left := find_leftovers()).count and time.monotonic() < deadline:
            time.sleep(POLL_S)
        assert left.count == 0, left
        assert shared_memory() <= self.shm_before, sorted(shared_memory() - self.shm_before)

    def check_record(self) -> None:
        """Every reward is finite; every group that was given has one fate, or waits in the last checkpoint; no loose ends are printed."""
        output = (self.folder / "output.txt").read_text(errors="replace")
        assert not [words for words in ("Task was destroyed", "was never retrieved", "was never awaited") if words in output]
        for step, metrics in self.metrics().items():
            for name in ("reward/episode/mean", "train/loss/value"):
                assert name not in metrics or math.isfinite(metrics[name]), (step, name)
        run = self.run_folder
        point = newest_whole_checkpoint(run.checkpoints).point
        unfinished = {result.group for result in point.arrived} | {one.uid for one in point.reissue}
        findings = check_group_log(
            read_group_log(run.groups),
            staleness=STALENESS,
            groups_per_step=GROUPS_PER_STEP,
            given=uids_given(point.source_state),
            unfinished=unfinished,
        )
        assert findings == []

    def report(self, number: int, what: str) -> None:
        """One line for the reader."""
        print(f"[{self.kind}] {number}: {what}", flush=True)


def kill(process: psutil.Process) -> None:
    """kill -9; one that has just ended is as good."""
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return


def shared_memory() -> frozenset[str]:
    """Files of shared memory."""
    return frozenset(os.listdir("/dev/shm"))
