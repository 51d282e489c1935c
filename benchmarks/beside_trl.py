"""psrl beside TRL's GRPO trainer with a tool: the same model, tasks, batch, settings and machine, one after the other.

    python benchmarks/beside_trl.py [--steps 12] [--trl-venv .venv-trl] [KEY=VALUE ...]

psrl runs twice: strictly on-policy like TRL, and with a staleness of 1, where generation and training overlap. KEY=VALUE go to both.

TRL gets a virtual environment of its own, made on the first run (`pip install trl`, with this one's torch and transformers). Its tool
runs in its own process, without isolation; psrl's in the sandbox. Both train the shipped model of `retool_tiny` on the same 1024
arithmetic tasks: 16 tasks of 8 episodes a step, two tool turns at most, learning rate 5e-4 and the same schedule, float32, all cores.

Printed for each: trajectories per second between the first and the last step by the clock, and per second of CPU that the processes
took (on a machine that does other work too, only these can be compared); accuracy of the training episodes over time; what psrl's steps
spent their time on. Beside them the limit of the machine's arithmetic: the work's FLOPs (6 per parameter and trained token, 2 per
parameter and generated or read one, no padding, nothing computed twice but prompts) at the rate of one large matrix product measured
here, by the fastest library that was found.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from psrl.config.processor import openblas_environment

os.environ.update(openblas_environment())  # before numpy is there

import numpy as np
import psutil
import torch
import transformers

from psrl.datasets.generators.arithmetic import ArithmeticGenerator
from psrl.kernels.products import product
from psrl.telemetry import names
from psrl.telemetry.json_lines import read_json_lines
from psrl.telemetry.metric_log import read_metrics
from psrl.telemetry.run_folder import RunFolder

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL = REPOSITORY / "psrl" / "recipes" / "retool_tiny" / "model"
TRL_VERSION = "1.16.0"
TASKS, GROUP, NUM_TASKS, LR, WARMUP, COMPLETION, TOOL_TURNS = 16, 8, 1024, 5e-4, 2, 144, 2
STALENESSES = (0, 1)
AIM = 3.0
MIN_SHARE_SHOWN = 0.001
SAMPLE_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One side."""

    name: str
    times: list[float]
    """When each step ended, in seconds since the epoch; the first step is not measured, it starts things up."""
    accuracies: list[float]
    cpu_s: float
    """Of all its processes, from the end of the first step to the end of the last."""

    @property
    def num_trajectories(self) -> int:
        return TASKS * GROUP * (len(self.times) - 1)

    @property
    def per_second(self) -> float:
        return self.num_trajectories / (self.times[-1] - self.times[0])

    @property
    def per_cpu_second(self) -> float:
        return self.num_trajectories / self.cpu_s


class CpuOfTree(threading.Thread):
    """Seconds of CPU that a process and its descendants took, over time.

    Consumes nothing; looks every SAMPLE_S; ended by `stop`.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root = psutil.Process(pid)
        self._samples: list[tuple[float, float]] = []
        self._done = threading.Event()

    def run(self) -> None:
        while not self._done.wait(SAMPLE_S):
            try:
                members = [self._root, *self._root.children(recursive=True)]
            except psutil.NoSuchProcess:
                return
            seconds = 0.0
            for member in members:
                try:
                    seconds += sum(member.cpu_times()[:4])  # its own, and of children that ended and were waited for
                except psutil.NoSuchProcess:
                    continue
            self._samples.append((time.time(), seconds))

    def between(self, start: float, end: float) -> float:
        self._done.set()
        self.join()
        at, seconds = np.array(self._samples).T
        return float(np.interp(end, at, seconds) - np.interp(start, at, seconds))


def trl_python(venv: Path) -> Path:
    python = venv / "bin" / "python"
    if not (venv / "made").exists():
        print(f"making {venv}: TRL {TRL_VERSION} and what it needs", flush=True)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        packages = [f"trl=={TRL_VERSION}", "jmespath", f"torch=={torch.__version__}", f"transformers=={transformers.__version__}"]
        subprocess.run([python, "-m", "pip", "install", "-q", *packages], check=True)
        (venv / "made").touch()
    return python


def measure_trl(folder: Path, options: argparse.Namespace) -> Measured:
    tasks = [
        {"prompt": [{"role": message.role.value, "content": message.content} for message in task.prompt], "answer": str(task.ground_truth)}
        for task in ArithmeticGenerator().train_tasks(NUM_TASKS, seed=1)
    ]
    settings = {
        "model": str(MODEL), "threads": os.cpu_count(), "tasks_per_step": TASKS, "group_size": GROUP, "num_steps": options.steps, "lr": LR,
        "warmup_steps": WARMUP, "max_completion_tokens": COMPLETION, "max_tool_turns": TOOL_TURNS, "output": str(folder / "trl"),
        "tasks": tasks,
    }  # fmt: skip
    (folder / "trl.json").write_text(json.dumps(settings))
    command = [trl_python(options.trl_venv), REPOSITORY / "benchmarks" / "trl" / "grpo.py", folder / "trl.json"]
    environment = {name: value for name, value in os.environ.items() if name not in openblas_environment()}
    with (
        (folder / "trl.log").open("w") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment) as process,
    ):
        cpu = CpuOfTree(process.pid)
        cpu.start()
        assert process.stdout is not None
        steps = [json.loads(line.removeprefix("STEP ")) for line in process.stdout if line.startswith("STEP ")]
    if process.returncode:
        raise SystemExit((folder / "trl.log").read_text()[-3000:])
    times = [step["time"] for step in steps[1:]]
    return Measured(name="TRL", times=times, accuracies=[step["accuracy"] for step in steps[1:]], cpu_s=cpu.between(times[0], times[-1]))


def measure_psrl(folder: Path, options: argparse.Namespace, *, staleness: int) -> tuple[Measured, dict[int, dict[str, float]]]:
    runs = folder / f"staleness{staleness}"
    overrides = [
        f"trainer.total_training_steps={options.steps}", f"data.train_batch_size={TASKS}", f"psrl.rollout_n={GROUP}",
        f"data.generator.num_train={NUM_TASKS}", "data.generator.num_val=2", "train_actor_rollout_ref.rollout.n=1",
        "trainer.val_greedy=false", f"psrl.staleness={staleness}",
        f"train_actor_rollout_ref.actor.optim.lr={LR}", f"train_actor_rollout_ref.actor.optim.lr_warmup_steps={WARMUP}",
        "train_actor_rollout_ref.actor.optim.min_lr_ratio=0.0", f"gen_actor_rollout_ref.rollout.response_length={COMPLETION}",
        f"gen_actor_rollout_ref.rollout.multi_turn.max_turns={TOOL_TURNS + 1}", "trainer.test_freq=0", "trainer.val_before_train=false",
        "trainer.logger=[jsonl]", f"trainer.default_local_dir={runs}", *options.overrides,
    ]  # fmt: skip
    command = [sys.executable, "-m", "psrl", "train", "retool_tiny", *overrides]
    with (folder / "psrl.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log, cwd=folder) as process:
        cpu = CpuOfTree(process.pid)
        cpu.start()
    if process.returncode:
        raise SystemExit((folder / "psrl.log").read_text()[-3000:])
    run = RunFolder.latest(runs, "retool_tiny")
    assert run is not None
    times = {line["step"]: line["time"] for line in read_json_lines(run.metrics) if names.STEP_SECONDS in line["metrics"]}
    metrics = read_metrics(run.metrics)
    steps = sorted(times)
    ends = [times[step] for step in steps]
    accuracies = [metrics[step][names.ACCURACY_MEAN] for step in steps]
    name = "psrl, on-policy" if staleness == 0 else f"psrl, staleness {staleness}"
    measured = Measured(name=name, times=ends, accuracies=accuracies, cpu_s=cpu.between(ends[0], ends[-1]))
    return measured, {step: metrics[step] for step in steps[1:]}


def flops_per_s() -> float:
    """The best of some large float32 products: MKL's on all cores, or on each core what one does by psrl's choice of library."""
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    num_threads, best = torch.get_num_threads(), 0.0
    with torch.inference_mode():
        for threads in (num_threads, 1):
            torch.set_num_threads(threads)
            for _ in range(20):
                began = time.perf_counter()
                product(left, right)
                best = max(best, num_threads / threads * 2 * 1024**3 / (time.perf_counter() - began))
    torch.set_num_threads(num_threads)
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--trl-venv", type=Path, default=REPOSITORY / ".venv-trl")
    parser.add_argument("overrides", nargs="*", help="of psrl's settings")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        trl = measure_trl(Path(temporary), options)
        ours = [measure_psrl(Path(temporary), options, staleness=staleness) for staleness in STALENESSES]
    num_parameters = sum(
        parameter.numel() for parameter in transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).parameters()
    )
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"{load}; {len(trl.times) - 1} steps of {TASKS * GROUP} trajectories")
    show(trl)
    for side, steps in ours:
        show(side)
        shares = {use: fmean(step[names.time_share(use)] for step in steps.values()) for use in names.TimeUse}
        print("  of a step:", ", ".join(f"{use} {share:.1%}" for use, share in shares.items() if share >= MIN_SHARE_SHOWN))
    _, steps = ours[0]
    tokens = fmean(step[names.TRAIN_TOKENS_COUNT] for step in steps.values())
    flops, rate = (6 + 2) * num_parameters * tokens, flops_per_s()
    bound = TASKS * GROUP / (flops / rate)
    work = f"{tokens:.0f} tokens, {flops / 1e9:.1f} GFLOP a step at {rate / 1e9:.0f} GFLOP/s"
    print(f"limit of the arithmetic: {bound:.0f} trajectories/s ({work})")
    for side, _ in ours:
        ratio, cpu_ratio = side.per_second / trl.per_second, side.per_cpu_second / trl.per_cpu_second
        print(f"{side.name} / TRL: {ratio:.2f} by the clock, {cpu_ratio:.2f} by CPU (aim: at least {AIM:g})")
    return 0 if max(side.per_second for side, _ in ours) >= AIM * trl.per_second else 1


def show(side: Measured) -> None:
    """Rates, and accuracy over time."""
    curve = " ".join(f"{end - side.times[0]:.0f}s:{accuracy:.2f}" for end, accuracy in zip(side.times, side.accuracies, strict=True))
    print(f"{side.name:17s} {side.per_second:7.2f} trajectories/s, {side.per_cpu_second:7.2f} per second of CPU; accuracy {curve}")


if __name__ == "__main__":
    sys.exit(main())
