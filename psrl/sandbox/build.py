"""From the `sandbox` section to the sandboxes that it asks for."""

from __future__ import annotations

import asyncio
import dataclasses

from psrl.config.sandbox import SandboxConfig
from psrl.config.sandbox_checks import no_network_error
from psrl.errors import ConfigError, SandboxUnavailableError
from psrl.protocols import ProgramRunner, Sandboxes
from psrl.registry import Registry
from psrl.sandbox.backend import SandboxBackend
from psrl.sandbox.bubblewrap import BubblewrapBackend
from psrl.sandbox.docker_sandbox import DockerBackend
from psrl.sandbox.guest_sandbox import GuestSandbox
from psrl.sandbox.interpreter import PythonInterpreter
from psrl.sandbox.process import ProcessBackend
from psrl.sandbox.reaper import worker_label
from psrl.sandbox.sandbox_fusion import SandboxFusionBackend, SandboxFusionInterpreter
from psrl.types import CommandResult, SandboxLimits, SandboxSpec

backends = Registry[type[SandboxBackend]]("sandbox backend", key="sandbox.backend")
backends.register("bubblewrap")(BubblewrapBackend)
backends.register("docker")(DockerBackend)
backends.register("process")(ProcessBackend)
backends.register("sandbox_fusion")(SandboxFusionBackend)


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
    """Sandboxes of `sandbox.backend`, labelled by the run; at most `sandbox.max_starts` of them start at the same time."""

    def __init__(self, settings: SandboxConfig, *, run: str = "run") -> None:
        """`run` labels what they leave if this process dies. ConfigError: the backend is unknown or cannot work with the settings."""
        self._backend = backends.resolve(settings.backend)(settings)
        self._settings = settings
        self._run = run
        self._start_slots = asyncio.Semaphore(settings.max_starts)

    def make(self, spec: SandboxSpec) -> GuestSandbox:
        """See `Sandboxes`. The network is open where both the spec and `sandbox.allow_network` say so."""
        if spec.image is not None and not self._backend.has_images:
            raise ConfigError(
                key="sandbox.backend",
                value=self._settings.backend,
                rule=f"has no images, and the task needs {spec.image}",
                fix="set sandbox.backend=docker",
            )
        is_open = spec.limits.allow_network and self._settings.allow_network
        if is_open and not self._backend.can_open_network:
            raise no_network_error(self._settings.backend)
        spec = dataclasses.replace(spec, limits=dataclasses.replace(spec.limits, allow_network=is_open))
        return self._backend.make(label=worker_label(self._run), spec=spec, start_slots=self._start_slots)

    async def preflight(self, spec: SandboxSpec | None = None) -> None:
        """Make one place, run a command in it that must print 5, remove it. Without a spec: as far as the backend can without a task.

        Raises:
            SandboxUnavailableError: It did not; says what came instead, and the fix.
        """
        if await self._backend.is_known_to_work() and spec is None:
            return
        sandbox = self.make(spec or SandboxSpec(limits=limits_of(self._settings)))
        try:
            await sandbox.start()
            result = await sandbox.run(["sh", "-c", "echo $((2+3))"])
        finally:
            await sandbox.stop()
        if result.exit_code != 0 or result.stdout != b"5\n":
            raise SandboxUnavailableError(f"echo $((2+3)) must print 5, but {shown(result)}. Fix: {PREFLIGHT_FIX}")


PREFLIGHT_FIX = "raise sandbox.wall_s and sandbox.memory_mb, and look for an overloaded machine"


def shown(result: CommandResult) -> str:
    """How a program ended, in words."""
    seen = dataclasses.asdict(result)
    return "the sandbox gave " + ", ".join(f"{name} {seen[name]!r}" for name in ("stdout", "stderr", "exit_code", "killed_by"))


def build_sandbox(settings: SandboxConfig, *, run: str = "run") -> GuestSandbox:
    """One sandbox, not started; `run` labels what it leaves if this process dies.

    Raises:
        ConfigError: The backend is unknown.
    """
    return BackendSandboxes(settings, run=run).make(SandboxSpec(limits=limits_of(settings)))


def build_interpreter(settings: SandboxConfig, *, run: str = "run") -> ProgramRunner:
    """What runs the code interpreter's programs, not started; the first call or `start` starts it.

    Raises:
        ConfigError: The backend is unknown, or cannot work with the settings.
    """
    if settings.backend == "sandbox_fusion":
        return SandboxFusionInterpreter(settings)
    return build_pool(settings, run=run)


def build_pool(settings: SandboxConfig, *, run: str = "run") -> PythonInterpreter:
    """`num_workers` sandboxes of this machine with warm interpreters, not started.

    Raises:
        ConfigError: The backend is unknown, or cannot work with the settings.
    """
    sandboxes = BackendSandboxes(settings, run=run)
    return PythonInterpreter(lambda: sandboxes.make(SandboxSpec(limits=limits_of(settings))), num_workers=settings.num_workers)
