"""What a sandbox is asked for, and how a program in it ended."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """Bounds that hold outside of the code that runs inside."""

    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_bytes: int = 512 * 2**20
    num_processes: int = 64
    output_bytes: int = 64 * 1024
    """Head and tail are kept, the middle is dropped and counted."""
    disk_bytes: int = 64 * 2**20
    allow_network: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxSpec:
    """Which place to make."""

    image: str | None = None
    """Container image, pinned by digest where it comes from a registry; None: the backend's own system."""
    workdir: str = "/tmp"
    """Absolute folder in which programs start, writable; made where it is missing."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    """Of the place (disk, network), and of each program where `run` is given none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult:
    """How a program in a sandbox ended."""

    stdout: bytes
    stderr: bytes
    exit_code: int | None
    """None when it was killed; then `killed_by` says why."""
    killed_by: str | None = None
    """`wall_time`, `cpu_time`, `memory`, `output`, `processes`, `disk`, `tampered`, `signal:<n>`, `sandbox_lost` or None."""
    dropped_output_bytes: int = 0
    queue_s: float = 0.0
    run_s: float = 0.0
