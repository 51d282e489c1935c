"""Sandbox of Linux namespaces, made by bubblewrap: no network, no host files, its own pids, a small tmpfs.

It has no network to give: what bubblewrap could share is the host's own, with all that listens on its loopback.

A worker that is root drops to an unprivileged user first, because the kernel bounds no number of processes for root. From
there on root and ordinary users go the same way: a user namespace without capabilities and without the right to
make further ones, the guest as pid 1 of a pid namespace that dies with the worker.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from psrl.config.sandbox import SandboxConfig
from psrl.errors import SandboxUnavailableError
from psrl.sandbox.backend import SandboxBackend
from psrl.sandbox.guest_sandbox import GUEST_FILES, LABEL_VARIABLE, guest_source
from psrl.sandbox.local_guest import GuestCommand, LocalGuestSandbox, load_guest
from psrl.sandbox.packages import PACKAGES_FOLDER, PROGRAMS_FOLDER, PSRL_FOLDER, Packages, packages_of
from psrl.sandbox.seccomp import denied_calls_filter
from psrl.types import SandboxSpec

GUEST_FOLDER = f"{PSRL_FOLDER}/guest"
UNPRIVILEGED_UID = 65533
"""Owns nothing on any usual system; what runs inside has this uid where the worker is root."""
SYSTEM_FOLDERS = ("/usr/bin", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libx32", "/usr/share/zoneinfo", "/usr/share/git-core")
ROOT_LINKS = ("/bin", "/lib", "/lib32", "/lib64", "/libx32")
SHM_BYTES = 8 * 2**20
"""Beside the disk limit: semaphores of multiprocessing live in /dev/shm."""
OTHER_PYTHONS = ("/usr/bin/python3", "/usr/local/bin/python3")
FIX = (
    "allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, user.max_user_namespaces=10000, "
    "kernel.apparmor_restrict_unprivileged_userns=0; in Docker: --security-opt seccomp=unconfined --security-opt systempaths=unconfined), "
    "or, for trusted code only, set sandbox.backend=process"
)


class BubblewrapBackend(SandboxBackend):
    """The default on Linux."""

    def __init__(self, settings: SandboxConfig) -> None:
        """ConfigError: a package is not installed."""
        self._packages = packages_of(settings.packages)

    def make(self, *, label: str, spec: SandboxSpec, start_slots: AbstractAsyncContextManager[Any]) -> BubblewrapSandbox:
        """See `SandboxBackend`."""
        return BubblewrapSandbox(self._packages, label=label, spec=spec, start_slots=start_slots)


class BubblewrapSandbox(LocalGuestSandbox):
    """See the module."""

    def __init__(self, packages: Packages, *, label: str, spec: SandboxSpec, start_slots: AbstractAsyncContextManager[Any]) -> None:
        """See `GuestSandbox`."""
        super().__init__(label=label, spec=spec, start_slots=start_slots)
        self._packages = packages

    def _command(self) -> GuestCommand:
        bwrap = shutil.which("bwrap")
        if bwrap is None:
            raise SandboxUnavailableError("bwrap is not installed. Fix: apt-get install bubblewrap")
        user = UNPRIVILEGED_UID if os.geteuid() == 0 else None
        python, prefix = find_python(is_root=user is not None)
        argv = [bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session", "--as-pid-1"]
        argv += ["--cap-drop", "ALL", "--clearenv", "--hostname", "sandbox"]
        for folder in SYSTEM_FOLDERS:
            argv += ["--ro-bind-try", folder, folder]
        for link in ROOT_LINKS:
            if os.path.islink(link):
                argv += ["--symlink", os.readlink(link), link]
            else:
                argv += ["--ro-bind-try", link, link]
        argv += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache", "--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
        if prefix is not None:
            argv += ["--ro-bind", prefix, prefix]
        argv += ["--proc", "/proc", "--dev", "/dev", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm"]
        argv += ["--size", str(self.limits.disk_bytes), "--tmpfs", "/tmp"]
        info_read, info_write = os.pipe()
        argv += ["--info-fd", str(info_write)]
        fds = [info_write]
        for name in GUEST_FILES:
            fds.append(data_fd(guest_source(name)))
            argv += ["--perms", "0444", "--ro-bind-data", str(fds[-1]), f"{GUEST_FOLDER}/{name}"]
        for name in ("python", "python3"):
            argv += ["--symlink", python, f"{PROGRAMS_FOLDER}/{name}"]
        for name, path in self._packages.entries:
            argv += ["--ro-bind", str(path), f"{PACKAGES_FOLDER}/{name}"]
        for name, text in self._packages.programs:
            fds.append(data_fd(text.encode()))
            argv += ["--perms", "0555", "--ro-bind-data", str(fds[-1]), f"{PROGRAMS_FOLDER}/{name}"]
        filter_bytes = denied_calls_filter()
        if filter_bytes is not None:
            fds.append(data_fd(filter_bytes))
            argv += ["--seccomp", str(fds[-1])]
        work = self.spec.workdir
        scratch = ["/tmp", "/dev/shm"]
        if work not in scratch:
            argv += ["--size", str(self.limits.disk_bytes), "--tmpfs", work]
            scratch.append(work)
        argv += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", work]
        env = {
            "PATH": f"{PROGRAMS_FOLDER}:/usr/bin:/bin",
            "HOME": "/tmp",
            "TMPDIR": "/tmp",
            "LANG": "C.UTF-8",
            "LC_ALL": "C.UTF-8",
            "LD_BIND_NOW": "1",
            LABEL_VARIABLE: self.label,
        }
        if self._packages.entries:
            env["PYTHONPATH"] = PACKAGES_FOLDER
        for key, value in env.items():
            argv += ["--setenv", key, value]
        argv += [python, "-E", "-s", "-B", "-c", load_guest(GUEST_FOLDER), "isolated", work, *scratch]
        return GuestCommand(
            argv=tuple(argv), env={LABEL_VARIABLE: self.label}, cwd="/", user=user, pass_fds=tuple(fds), guest_pid_fd=info_read
        )

    def _fix(self) -> str:
        return FIX


def data_fd(content: bytes) -> int:
    """A file in memory to be read from its start by the child."""
    fd = os.memfd_create("psrl-sandbox")
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def find_python(*, is_root: bool) -> tuple[str, str | None]:
    """An interpreter that the sandbox's user can run, and the prefix to mount for it (None: the system's folders hold it).

    The worker's own base interpreter comes first, so that what is installed beside it can be imported inside.

    Raises:
        SandboxUnavailableError: There is none.
    """
    own = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    for candidate in (own, *map(Path, OTHER_PYTHONS)):
        if not os.access(candidate, os.X_OK):
            continue
        real = candidate.resolve()
        folders_open = all(folder.stat().st_mode & 0o001 for folder in real.parents)
        if is_root and not (folders_open and real.stat().st_mode & 0o001):
            continue
        if any(real.is_relative_to(folder) for folder in SYSTEM_FOLDERS):
            return str(real), None
        return str(candidate), str(real.parent.parent)
    raise SandboxUnavailableError(
        f"no Python that an unprivileged user can run ({own} lies in a closed folder). Fix: install python3 system-wide"
    )
