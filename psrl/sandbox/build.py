"""From the `sandbox` section to the sandboxes that it asks for."""

from __future__ import annotations

from psrl.config.sandbox import SandboxConfig
from psrl.errors import ConfigError
from psrl.protocols import Sandboxes
from psrl.registry import Registry
from psrl.sandbox.bubblewrap import BubblewrapSandbox
from psrl.sandbox.guest_sandbox import GuestSandbox
from psrl.sandbox.interpreter import PythonInterpreter
from psrl.sandbox.process import ProcessSandbox
from psrl.sandbox.reaper import worker_label
from psrl.types import SandboxLimits, SandboxSpec

backends = Registry[type[GuestSandbox]]("sandbox backend", key="sandbox.backend")
backends.register("bubblewrap")(BubblewrapSandbox)
backends.register("process")(ProcessSandbox)


def limits_of(settings: SandboxConfig) -> SandboxLimits:
    """The section's numbers in bytes and seconds; the network is off."""
    return SandboxLimits(
        wall_s=settings.wall_s,
        cpu_s=settings.cpu_s,
        memory_bytes=settings.memory_mb * 2**20,
        num_processes=settings.num_processes,
        output_bytes=settings.output_kb * 1024,
        disk_bytes=settings.disk_mb * 2**20,
    )


class BackendSandboxes(Sandboxes):
    """Sandboxes of `sandbox.backend`, labelled by the run."""

    def __init__(self, settings: SandboxConfig, *, run: str = "run") -> None:
        """`run` labels what they leave if this process dies. ConfigError: the backend is unknown."""
        self._backend = backends.resolve(settings.backend)
        self._settings = settings
        self._run = run

    def make(self, spec: SandboxSpec) -> GuestSandbox:
        """See `Sandboxes`."""
        if spec.image is not None:
            raise ConfigError(
                key="sandbox.backend",
                value=self._settings.backend,
                rule=f"has no images, and the task needs {spec.image}",
                fix="set sandbox.backend=docker",
            )
        return self._backend(label=worker_label(self._run), spec=spec)


def build_sandbox(settings: SandboxConfig, *, run: str = "run") -> GuestSandbox:
    """One sandbox, not started; `run` labels what it leaves if this process dies.

    Raises:
        ConfigError: The backend is unknown.
    """
    return BackendSandboxes(settings, run=run).make(SandboxSpec(limits=limits_of(settings)))


def build_interpreter(settings: SandboxConfig, *, run: str = "run") -> PythonInterpreter:
    """The pool of warm interpreters, not started; the first call or `start` starts it."""
    backends.resolve(settings.backend)
    return PythonInterpreter(lambda: build_sandbox(settings, run=run), num_workers=settings.num_workers)
