"""One kind of process of a run, with what it needs."""

from __future__ import annotations

from dataclasses import dataclass

from psrl.config.machine import Machine

MIB = 2**20
PROCESS_BYTES = {"plain": 150 * MIB, "torch": 450 * MIB, "vllm": 650 * MIB, "ray": 300 * MIB, "smg": 100 * MIB}
"""Resident size of an idle process: of Python with aiohttp; with torch and transformers; with vLLM; of Ray's own head processes together;
of SMG."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedProcess:
    """One kind of process."""

    role: str
    count: int
    num_cores: int
    """Threads that each computes with; 0 for one that mostly waits."""
    memory_bytes: int
    """Of each, at its largest."""
    reason: str
    """What the memory is for."""
    key: str
    """Setting that makes it smaller."""
    gpu_bytes: int = 0
    """Of each of its GPUs; 0 where it has none, or where the size of the cards is not known."""


def threads_of(given: int, machine: Machine, count: int) -> int:
    """A setting of 0 shares the cores among `count` processes that compute at the same time."""
    return given or max(1, machine.num_cores // count)
