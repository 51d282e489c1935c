"""`sandbox`: where model-written code runs."""

import os
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class SandboxConfig:
    """One backend for all of a run."""

    backend: str = "bubblewrap"
    """`bubblewrap`, `docker`, or `process` (no isolation: only for trusted code)."""
    num_workers: int = 2
    """Programs that the code interpreter runs at once in one agent worker."""
    max_starts: int = 4
    """Sandboxes that start at once in one agent worker; others wait."""
    wall_s: float = 10.0
    cpu_s: float = 10.0
    memory_mb: int = 512
    num_processes: int = 64
    output_kb: int = 64
    disk_mb: int = 64
    allow_network: bool = False
    """`docker`: whether a project that asks for the network (`allow_network` of its row) gets it; nothing else ever does."""
    packages: list[str] = field(default_factory=list)
    """Distributions installed here, with all that they need, that programs can import; not in images."""
    image: str | None = None
    """`docker`: of sandboxes whose task names none; null: one made of this machine's own files."""
    user: str | None = None
    """`docker`: who programs run as; null: as the image says."""
    cpus: float = 0.0
    """`docker`: cores that one container may use at a time; 0: all."""
    pull_timeout_s: float = 1800.0
    """`docker`: of one image."""
    engine_url: str | None = None
    """`docker`: the Engine, such as `unix:///run/docker.sock`; null: DOCKER_HOST, else the usual socket."""


def engine_url_of(settings: SandboxConfig) -> str | None:
    """Where the Docker Engine is; None: at the usual socket."""
    return settings.engine_url or os.environ.get("DOCKER_HOST") or None
