"""Settings of `sandbox` that cannot work with each other, or have no effect."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

from psrl.config.sandbox import SandboxConfig, service_urls_of
from psrl.config.tree import Config
from psrl.errors import ConfigError

WITHOUT_NETWORK = ("bubblewrap", "process", "sandbox_fusion")
OF_SERVICES = ("urls", "api_key_file", "max_queue_s")
NOT_OF_SERVICES = ("max_starts", "cpu_s", "num_processes", "disk_mb", "packages")
"""What a service decides for itself."""
ENGINE_SCHEMES = ("unix://", "tcp://", "http://")


def check_sandbox(config: Config) -> None:
    """See the module.

    Raises:
        ConfigError: The first one.
    """
    settings, defaults = config.sandbox, SandboxConfig()
    of_containers = {
        "image": (settings.image, defaults.image),
        "user": (settings.user, defaults.user),
        "cpus": (settings.cpus, defaults.cpus),
        "pull_timeout_s": (settings.pull_timeout_s, defaults.pull_timeout_s),
        "engine_url": (settings.engine_url, defaults.engine_url),
    }
    for name, (value, default) in of_containers.items():
        if value != default and settings.backend != "docker":
            rule = f"has no effect with sandbox.backend={settings.backend}, which has no containers"
            raise ConfigError(key=f"sandbox.{name}", value=value, rule=rule, fix="set sandbox.backend=docker, or leave it out")
        if value == "":
            raise ConfigError(key=f"sandbox.{name}", value=value, rule="is empty", fix=f"set sandbox.{name}=null, or a name")
    _check_service(settings, defaults)
    if settings.allow_network and settings.backend in WITHOUT_NETWORK:
        raise no_network_error(settings.backend)
    if settings.engine_url is not None and not settings.engine_url.startswith(ENGINE_SCHEMES):
        rule = f"must begin with one of {', '.join(ENGINE_SCHEMES)}"
        raise ConfigError(
            key="sandbox.engine_url", value=settings.engine_url, rule=rule, fix="sandbox.engine_url=unix:///var/run/docker.sock"
        )
    if settings.packages and settings.image is not None:
        rule = f"are not put into an image that is named, such as {settings.image}"
        fix = "install them in the image and leave sandbox.packages out, or leave sandbox.image out"
        raise ConfigError(key="sandbox.packages", value=settings.packages, rule=rule, fix=fix)
    for name in settings.packages:
        _check_installed(name)


def _check_service(settings: SandboxConfig, defaults: SandboxConfig) -> None:
    """Either a service is named and asked, or none is."""
    is_service = settings.backend == "sandbox_fusion"
    for name in NOT_OF_SERVICES if is_service else OF_SERVICES:
        value = vars(settings)[name]
        if value != vars(defaults)[name]:
            why = "its services decide that" if is_service else "which asks no service"
            rule = f"has no effect with sandbox.backend={settings.backend}: {why}"
            fix = "set sandbox.backend=sandbox_fusion, or leave it out"
            if is_service:
                fix = f"leave sandbox.{name} out (its default is {vars(defaults)[name]})"
            raise ConfigError(key=f"sandbox.{name}", value=value, rule=rule, fix=fix)
    if not is_service:
        return
    service_urls_of(settings)
    if settings.api_key_file is not None and not Path(settings.api_key_file).is_file():
        raise ConfigError(
            key="sandbox.api_key_file", value=settings.api_key_file, rule="is no file", fix="name the file with the service's key"
        )


def no_network_error(backend: str) -> ConfigError:
    """A sandbox of this backend can have no network of its own."""
    rule = f"sandbox.backend={backend} has no network but this machine's own, with the run's gateway, Ray and data plane on its loopback"
    fix = "set sandbox.backend=docker, or sandbox.allow_network=false"
    return ConfigError(key="sandbox.allow_network", value=True, rule=rule, fix=fix)


def _check_installed(name: str) -> None:
    try:
        metadata.distribution(name.partition("[")[0])
    except (metadata.PackageNotFoundError, ValueError) as error:
        raise ConfigError(
            key="sandbox.packages", value=name, rule=f"{name} is not installed here", fix=f"pip install {name}, or leave it out"
        ) from error
