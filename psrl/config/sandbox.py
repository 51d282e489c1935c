"""`sandbox`: where model-written code runs."""

import os
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from psrl.errors import ConfigError


@dataclass(kw_only=True)
class SandboxConfig:
    """One backend for all of a run."""

    backend: str = "bubblewrap"
    """`bubblewrap`, `docker`, `sandbox_fusion` (a service, for the code interpreter), or `process` (no isolation: for trusted code)."""
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
    urls: list[str] = field(default_factory=list)
    """`sandbox_fusion`: services, such as `http://host:8080`; programs are spread over them."""
    api_key_file: str | None = None
    """`sandbox_fusion`: holds the services' key; null: they want none."""
    max_queue_s: float = 60.0
    """`sandbox_fusion`: longest that a program waits for a place in a service, further tries included."""


SERVICE_SCHEMES = ("http://", "https://")
RUN_CODE = "/run_code"


def service_urls_of(settings: SandboxConfig) -> list[str]:
    """The SandboxFusion services, without `/run_code`, which verl's users write with it.

    Raises:
        ConfigError: There is none, one stands there twice, or an address is none.
    """
    fix = "sandbox.urls=[http://127.0.0.1:8080]; `psrl serve sandbox` starts such a service"
    if not settings.urls:
        raise ConfigError(key="sandbox.urls", value=[], rule="sandbox.backend=sandbox_fusion needs a service", fix=fix)
    urls = [url.rstrip("/").removesuffix(RUN_CODE) for url in settings.urls]
    for given, url in zip(settings.urls, urls, strict=True):
        try:
            parts = urlsplit(url)
            is_address = bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is none
            is_address = False
        if not (url.startswith(SERVICE_SCHEMES) and is_address):
            raise ConfigError(key="sandbox.urls", value=given, rule="is no address of a service", fix=fix)
        if parts.username is not None or parts.password is not None:
            rule = "holds a password, which the run folder would keep"
            raise ConfigError(key="sandbox.urls", value="***", rule=rule, fix="set sandbox.api_key_file")
    if len(set(urls)) != len(urls):
        raise ConfigError(key="sandbox.urls", value=settings.urls, rule="names a service twice", fix="leave one of them out")
    return urls


def engine_url_of(settings: SandboxConfig) -> str | None:
    """Where the Docker Engine is; None: at the usual socket."""
    return settings.engine_url or os.environ.get("DOCKER_HOST") or None
