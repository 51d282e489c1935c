"""Where the seconds go between `psrl train retool_tiny` and its first optimizer step, beside the parts that nobody can avoid.

`python benchmarks/startup.py` runs three training steps without a validation before and prints when each part was up (they start at
the same time), then how long Ray's own start and the imports of torch and transformers take alone, in processes of their own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from psrl.telemetry.metric_log import read_metrics

RUN_LIMIT_S = 300
ALONE = {
    "import torch": "import torch",
    "import torch, transformers' model": "import torch; from transformers import AutoModelForCausalLM",
    "import transfer_queue": "import transfer_queue",
    "start and stop Ray": "import ray; ray.init(address='local', num_cpus=1, include_dashboard=False, log_to_driver=False); ray.shutdown()",
}


def seconds_of(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, timeout=RUN_LIMIT_S, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        overrides = ["trainer.total_training_steps=3", "trainer.test_freq=0", "trainer.val_before_train=false", "data.generator.num_val=8"]
        whole_s = seconds_of([sys.executable, "-m", "psrl", "train", "retool_tiny", f"trainer.default_local_dir={folder}", *overrides])
        (metrics_file,) = Path(folder).glob("*/*/metrics.jsonl")
        metrics = read_metrics(metrics_file)
    parts = {name.split("/")[1]: value for name, value in metrics[0].items() if name.startswith("startup/")}
    for part, up_s in sorted(parts.items(), key=lambda item: item[1]):
        print(f"{part:34s} up after {up_s:6.1f} s")
    step_s = metrics[1]["time/step/seconds"]
    first_step_s = max(parts.values()) + step_s
    print(f"{'first optimizer step':34s} after    {first_step_s:6.1f} s (the step itself {step_s:.1f} s)")
    print(f"{'whole command, with its end':34s}          {whole_s:6.1f} s")
    alone = {what: seconds_of([sys.executable, "-c", code]) for what, code in ALONE.items()}
    for what, seconds in alone.items():
        print(f"{what:34s} alone    {seconds:6.1f} s")
    floor_s = alone["start and stop Ray"] + alone["import torch, transformers' model"] + step_s
    print(f"ratio: first step / (Ray + imports + step, one after the other) = {first_step_s / floor_s:.2f}")


if __name__ == "__main__":
    main()
