"""Does a long run stay as small as it was? Memory of every process of a real asynchronous run, and the slope of each.

    python benchmarks/soak.py --minutes 30 [--series points.csv]

Runs `psrl train retool_tiny` with staleness 2, two replicas, redundancy, validation and checkpoints, looks at every process of it
every ten seconds (anonymous memory: a file's pages change hands when another process that maps them ends), and fits a line to the second
half of the time. Beside it stands the size at the half, so that the slope can be read as a share. Ends with 1 if a process grows faster
than --limit-share of its size per hour and by more than --limit-mb per hour.
"""

from __future__ import annotations

import argparse
import csv
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

LOOK_S = 10.0
MIB = 2**20
SETTINGS = (
    "psrl.staleness=2",
    "psrl.redundant_groups=2",
    "psrl.redundant_episodes=1",
    "gen_actor_rollout_ref.rollout.num_replicas=2",
    "data.train_batch_size=8",
    "data.generator.num_val=16",
    "train_actor_rollout_ref.rollout.n=1",
    "train_actor_rollout_ref.actor.optim.lr=1e-5",
    "trainer.test_freq=25",
    "trainer.save_freq=25",
    "trainer.total_training_steps=1000000",
)
STOP_LIMIT_S = 120.0
NAMES = (
    (re.compile(r"ray::(\w+)"), r"\1"),
    (re.compile(r"psrl\.engines\.(\w+)"), r"engine \1"),
    (re.compile(r"(raylet|gcs_server|bwrap)"), r"\1"),
    (re.compile(r"psrl train"), "driver"),
    (re.compile(r"psrl\.(\w+)"), r"psrl.\1"),
)


def name_of(process: psutil.Process) -> str:
    """What a process is, from its command line."""
    line = " ".join(process.cmdline())
    for pattern, text in NAMES:
        found = pattern.search(line)
        if found:
            return found.expand(text)
    return line.split(" ")[0].rsplit("/", 1)[-1] or process.name()


def look(root: psutil.Process, began: float, seen: dict[tuple[str, int], list[tuple[float, float]]]) -> None:
    """Add (minutes, MiB) of every process that lives now."""
    for process in [root, *root.children(recursive=True)]:
        try:
            key = (name_of(process), process.pid)
            memory = process.memory_info()
            seen[key].append(((time.monotonic() - began) / 60, (memory.rss - memory.shared) / MIB))
        except psutil.Error:
            continue


def slopes(seen: dict[tuple[str, int], list[tuple[float, float]]], minutes: float) -> list[tuple[str, int, float, float, float]]:
    """(name, pid, MiB at the half, MiB at the end, MiB per hour over the second half) of those that lived through it."""
    rows = []
    for (name, pid), points in sorted(seen.items()):
        later = np.array([point for point in points if point[0] >= minutes / 2])
        if len(later) < 0.9 * (minutes / 2) * 60 / LOOK_S * 0.5 or points[-1][0] < minutes * 0.95:
            continue
        per_minute, _ = np.polyfit(later[:, 0], later[:, 1], 1)
        rows.append((name, pid, later[0, 1], later[-1, 1], per_minute * 60))
    return rows


def write_series(path: Path, seen: dict[tuple[str, int], list[tuple[float, float]]]) -> None:
    """Every point of every process, to be looked at when one grows."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("process", "pid", "minutes", "MiB"))
        writer.writerows((name, pid, *point) for (name, pid), points in seen.items() for point in points)


def main() -> int:
    """Run, look, fit, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--limit-mb", type=float, default=20.0, help="growth per hour that is always allowed, MiB")
    parser.add_argument("--limit-share", type=float, default=0.1, help="growth per hour that is allowed, as a share of the size")
    parser.add_argument("--series", type=Path, help="a CSV file for every point of every process")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="psrl-soak-") as folder:
        output = Path(folder) / "output.txt"
        command = [sys.executable, "-m", "psrl", "train", "retool_tiny", *SETTINGS, f"trainer.default_local_dir={folder}/runs"]
        with output.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
        seen: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
        began = time.monotonic()
        while time.monotonic() - began < options.minutes * 60 and process.poll() is None:
            look(psutil.Process(process.pid), began, seen)
            time.sleep(LOOK_S)
        has_died = process.poll() is not None
        if not has_died:
            process.send_signal(signal.SIGINT)
            process.wait(STOP_LIMIT_S)
        lines = output.read_text().splitlines()
        steps = [line for line in lines if line.startswith("step")]
        run_bytes = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    if options.series:
        write_series(options.series, seen)
    if has_died:
        print("\n".join(lines[-20:]))
        print("the run ended by itself")
        return 1
    table = Table("process", "pid", "MiB at half time", "MiB at the end", "MiB/hour", "share/hour")
    grown = []
    for name, pid, half, end, slope in slopes(seen, options.minutes):
        table.add_row(name, str(pid), f"{half:.1f}", f"{end:.1f}", f"{slope:+.2f}", f"{slope / half:+.1%}")
        if slope > options.limit_mb and slope > options.limit_share * half:
            grown.append(name)
    Console(width=120).print(table)
    print(f"{options.minutes:g} minutes, last line: {steps[-1] if steps else 'none'}")
    print(f"run folder: {run_bytes / MIB:.1f} MiB; processes looked at: {len(seen)}")
    print(f"grown: {', '.join(grown) or 'none'}")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
