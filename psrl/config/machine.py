"""What this machine has for a run: cores, memory, CUDA cards."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP_MEMORY_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
CGROUP_CPU_FILE = "/sys/fs/cgroup/cpu.max"
NVIDIA_SMI_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What this machine has for us: the container's limits where there are any."""

    num_cores: int
    memory_bytes: int
    num_gpus: int = 0
    gpu_bytes: int = 0
    """Memory of one of them; 0: not known."""

    def has_gpu_for(self, device: str) -> bool:
        """Whether what runs with this setting (`auto`, `cpu`, `cuda`) is on a GPU."""
        return device == "cuda" or (device == "auto" and self.num_gpus > 0)


def read_machine() -> Machine:
    """Cores that this process may use, memory, CUDA GPUs that the driver lists."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _first_words(CGROUP_CPU_FILE)
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    memory = psutil.virtual_memory().total
    for path in CGROUP_MEMORY_FILES:
        words = _first_words(path)
        if words and words[0].isdigit():
            memory = min(memory, int(words[0]))
    gpus = Path("/proc/driver/nvidia/gpus")
    num_gpus = len(list(gpus.iterdir())) if gpus.is_dir() else 0
    return Machine(num_cores=cores, memory_bytes=memory, num_gpus=num_gpus, gpu_bytes=_card_bytes() if num_gpus else 0)


def _card_bytes() -> int:
    """Memory of the smallest card, by the driver's own program; 0 where it gives no answer."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return min((int(line) for line in answer.split() if line.isdigit()), default=0) * 2**20


def _first_words(path: str) -> list[str]:
    try:
        return Path(path).read_text().split()
    except OSError:
        return []
