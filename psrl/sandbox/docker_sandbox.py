"""Sandbox of a container on a Docker Engine, with the same guest inside as everywhere.

The Engine and the kernel bound memory, processes, cores, capabilities and network of the whole container; the guest bounds each program.
Where the task names no image, the system is read-only and `/tmp` and the workdir are folders in memory of `disk_bytes`, as in bubblewrap.
Where it does, the image's files can be written, and what was written is measured by the Engine while programs run.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from typing import Any

from psrl.config.sandbox import SandboxConfig, engine_url_of
from psrl.errors import SandboxError, SandboxUnavailableError
from psrl.sandbox.backend import SandboxBackend
from psrl.sandbox.docker_engine import DockerEngine, EngineRefusal
from psrl.sandbox.docker_guest import GONE, ContainerGuest, guest_argv, guest_bundle, removed, started
from psrl.sandbox.guest_sandbox import LABEL_VARIABLE, GuestSandbox, frame_of
from psrl.sandbox.images import Images
from psrl.sandbox.leftover_containers import labels_of
from psrl.sandbox.link import GuestLink
from psrl.sandbox.packages import PACKAGES_FOLDER, packages_of
from psrl.types import CommandResult, SandboxLimits, SandboxSpec

GUEST_BYTES = 48 * 2**20
"""The guest itself, and what the kernel counts for a container beside the programs' own memory."""
GUEST_PROCESSES = 2
SHM_BYTES = 64 * 2**20
CHECK_DISK_EVERY_S = 0.5
CHECK_DISK_SHARE = 0.05
"""Of the time at most goes into measuring, which takes longer the more files were written."""
READONLY_PATHS = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
"""Those of every container."""
OWN_READONLY_PATHS = ("/proc/1", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
"""The guest's; and the Engine's files beside the image's, which it does not measure."""
BOUNDED_ENV = {"HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"}


class DockerBackend(SandboxBackend):
    """What the containers of a worker share: the Engine's client and the images."""

    has_images = True
    can_open_network = True

    def __init__(self, settings: SandboxConfig) -> None:
        """ConfigError: a package is not installed. The Engine is first asked when a sandbox starts."""
        packages_of(settings.packages)
        self.settings = settings
        self.engine = DockerEngine(engine_url_of(settings))
        self.images = Images(self.engine, pull_timeout_s=settings.pull_timeout_s, packages=settings.packages)

    async def is_known_to_work(self) -> bool:
        """Where the settings name no image the Engine answers, and the tasks may name theirs: none is made for nobody."""
        await self.engine.ask("answer", lambda client: client.ping())
        return self.settings.image is None

    def make(self, *, label: str, spec: SandboxSpec, start_slots: contextlib.AbstractAsyncContextManager[Any]) -> DockerSandbox:
        """See `SandboxBackend`."""
        return DockerSandbox(self, label=label, spec=spec, start_slots=start_slots)


class DockerSandbox(GuestSandbox):
    """See the module."""

    def __init__(
        self, backend: DockerBackend, *, label: str, spec: SandboxSpec, start_slots: contextlib.AbstractAsyncContextManager[Any]
    ) -> None:
        """See `GuestSandbox`."""
        super().__init__(label=label, spec=spec, start_slots=start_slots)
        self._backend = backend
        self._name: str | None = None
        self._image = ""
        self._making: asyncio.Future[socket.socket] | None = None
        self._next_disk_check = 0.0

    async def _prepare(self) -> None:
        self._image = await self._backend.images.ensure(self.spec.image or self._backend.settings.image)

    async def _connect(self) -> GuestLink:
        try:
            link = await self._started()
        except EngineRefusal as refusal:
            if refusal.status != GONE:
                raise self._refused(refusal) from refusal
            # The image was removed since it was found.
            self._backend.images.forget(self.spec.image or self._backend.settings.image)
            await self._prepare()
            try:
                link = await self._started()
            except EngineRefusal as second:
                raise self._refused(second) from second
        with contextlib.suppress(ConnectionError):  # it ended at once; its last words say why
            await link.send(guest_bundle())
        self._next_disk_check = asyncio.get_running_loop().time() + CHECK_DISK_EVERY_S
        return link

    async def _started(self) -> ContainerGuest:
        self._name = name = f"psrl-{self.label}-{secrets.token_hex(6)}"
        options = {**container_options(self._backend.settings, self.spec, self._image), "name": name, "labels": labels_of(self.label)}
        options["environment"][LABEL_VARIABLE] = self.label

        def make(client: Any) -> socket.socket:
            return started(client, options)

        self._making = asyncio.ensure_future(self._backend.engine.ask(f"start the container {name}", make))
        # Shielded: a thread cannot be cancelled, and what it makes must be known to `_remove`.
        stream = await asyncio.shield(self._making)
        return ContainerGuest(self._backend.engine, name, stream)

    def _has_answered(self, link: GuestLink) -> None:
        self._making = None  # from here on the link removes the container

    async def _remove(self) -> None:
        """Remove the container of a start that failed or was cancelled."""
        making, self._making = self._making, None
        if making is None:
            return
        assert self._name is not None, "named before it is made"
        with contextlib.suppress(SandboxError):  # told by the start itself
            (await making).close()
        await removed(self._backend.engine, self._name)

    def _refused(self, refusal: EngineRefusal) -> SandboxUnavailableError:
        return SandboxUnavailableError(f"no container of {self.spec.image or self._image}: {refusal}. Fix: {self._fix()}")

    def _fix(self) -> str:
        return "use an image with /bin/sh and Python 3.9 or newer, and a workdir that its user (sandbox.user) may write"

    # ------------------------------------------------------------ disk

    async def _call(self, request: dict[str, Any], payload: bytes, limits: SandboxLimits) -> CommandResult:
        if self.spec.image is None:
            return await super()._call(request, payload, limits)
        watch = asyncio.create_task(self._watch_disk())
        try:
            return await super()._call(request, payload, limits)
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _watch_disk(self) -> None:
        """Consumes time; waits for the next check; unblocked by the clock, and cancelled when the program has ended."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(max(0.0, self._next_disk_check - clock()))
            began = clock()
            written = await self._written_bytes()
            self._next_disk_check = clock() + max(CHECK_DISK_EVERY_S, (clock() - began) / CHECK_DISK_SHARE)
            link = self._link
            if written > self.limits.disk_bytes and link is not None:
                await link.send(frame_of({"op": "end", "why": "disk"}))
                return

    async def _written_bytes(self) -> int:
        try:
            (found,) = await self._backend.engine.ask(
                "say how much a container has written",
                lambda client: client.containers(all=True, size=True, filters={"name": f"^/{self._name}$"}),
            )
        except (SandboxError, ValueError):  # the call itself will see that the container is gone
            return 0
        return int(found["SizeRw"]) if "SizeRw" in found else 0


def container_options(settings: SandboxConfig, spec: SandboxSpec, image: str) -> dict[str, Any]:
    """Arguments of the SDK's `create_container`, but for name and label."""
    from docker.types import HostConfig, LogConfig

    limits = spec.limits
    is_bounded = spec.image is None
    folders = sorted({"/tmp", spec.workdir}) if is_bounded else []
    memory_bytes = limits.memory_bytes + GUEST_BYTES + limits.disk_bytes * len(folders)
    host = HostConfig(
        version="1.41",
        auto_remove=True,
        init=False,
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        network_mode="bridge" if limits.allow_network else "none",
        mem_limit=memory_bytes,
        memswap_limit=memory_bytes,
        pids_limit=limits.num_processes + GUEST_PROCESSES,
        nano_cpus=int(settings.cpus * 1e9) or None,
        shm_size=SHM_BYTES,
        read_only=is_bounded,
        tmpfs={folder: f"rw,exec,nosuid,nodev,mode=1777,size={limits.disk_bytes}" for folder in folders},
        log_config=LogConfig(type="none"),
    )
    # Else a program that is root could have the kernel end the guest before itself, through /proc/1/oom_score_adj.
    host["ReadonlyPaths"] = [*READONLY_PATHS, *OWN_READONLY_PATHS]
    return {
        "image": image,
        "entrypoint": guest_argv(spec.workdir, (*folders, "/dev/shm") if is_bounded else ()),
        "command": [],
        "user": settings.user,
        "working_dir": "/" if is_bounded else spec.workdir,
        "environment": environment_of(settings, is_bounded=is_bounded),
        "hostname": "sandbox",
        "stdin_open": True,
        "healthcheck": {"test": ["NONE"]},
        # Pid 1 does not hear others; an Engine that stops would wait for it.
        "stop_signal": "SIGKILL",
        "host_config": host,
    }


def environment_of(settings: SandboxConfig, *, is_bounded: bool) -> dict[str, str]:
    """What programs find set beside what their image sets."""
    if not is_bounded:
        return {}
    return {**BOUNDED_ENV, "PYTHONPATH": PACKAGES_FOLDER} if settings.packages else dict(BOUNDED_ENV)
