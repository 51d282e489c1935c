"""From the `sandbox` section to the sandboxes that it asks for."""

from __future__ import annotations

from psrl.config.sandbox import SandboxConfig
from psrl.protocols import SandboxLimits
from psrl.registry import Registry
from psrl.sandbox.bubblewrap import BubblewrapSandbox
from psrl.sandbox.guest_sandbox import GuestSandbox
from psrl.sandbox.interpreter import PythonInterpreter
from psrl.sandbox.process import ProcessSandbox
from psrl.sandbox.reaper import worker_label

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


def build_sandbox(settings: SandboxConfig, *, run: str = "run") -> GuestSandbox:
    """One sandbox, not started; `run` labels what it leaves if this process dies.

    Raises:
        ConfigError: The backend is unknown.
    """
    return backends.resolve(settings.backend)(label=worker_label(run), limits=limits_of(settings))


def build_interpreter(settings: SandboxConfig, *, run: str = "run") -> PythonInterpreter:
    """The pool of warm interpreters, not started; the first call or `start` starts it."""
    backends.resolve(settings.backend)
    return PythonInterpreter(lambda: build_sandbox(settings, run=run), num_workers=settings.num_workers)
