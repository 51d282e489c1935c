"""`sandbox`: where model-written code runs."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class SandboxConfig:
    """One backend for all tools of a run."""

    backend: str = "bubblewrap"
    """`bubblewrap`, or `process` (no isolation: only for trusted code)."""
    num_workers: int = 2
    """Programs that run at once in one agent worker."""
    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_mb: int = 512
    num_processes: int = 64
    output_kb: int = 64
    disk_mb: int = 64
