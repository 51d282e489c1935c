"""What the kernel says of processes. Standard library only (Python 3.9 or newer): this file is copied into the sandbox."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
PAGE = resource.getpagesize()
TICKS = os.sysconf("SC_CLK_TCK")
NUM_RLIMITS = 16  # Linux, on every architecture
OOM_COUNTS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
"""Of a container: cgroup version 2, version 1."""
OWNERS_ATTRIBUTES = ("user.", "system.posix_acl_")
"""The others, such as SELinux's, are not the owner's to set."""
SYS_PIDFD_OPEN = 434  # on every architecture


def pidfd_of(pid: int) -> int:
    """`os.pidfd_open`, also of a Python that was built on an older system than it runs on."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    pidfd: int = LIBC.syscall(SYS_PIDFD_OPEN, pid, 0)
    if pidfd < 0:
        raise OSError(ctypes.get_errno(), "pidfd_open")
    return pidfd


def posture() -> tuple[Any, ...]:
    """What one process can change in another of the same user without a signal or a trace: limits and scheduling."""
    limits = tuple(resource.prlimit(0, kind) for kind in range(NUM_RLIMITS))
    return limits, os.getpriority(os.PRIO_PROCESS, 0), os.sched_getaffinity(0), os.sched_getscheduler(0)


def tree_of_calls(*, is_isolated: bool) -> dict[int, float]:
    """CPU seconds by pid of every process that this one has started, directly or not; where `is_isolated` that is every other one."""
    parents, cpu = {}, {}
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
        except OSError:  # it ended since the listing
            continue
        parents[int(name)] = int(fields[1])
        cpu[int(name)] = sum(map(int, fields[11:15])) / TICKS  # with the children that it waited for
    if is_isolated:
        return cpu
    mine, grown = {os.getpid()}, True
    while grown:
        found = {pid for pid, parent in parents.items() if parent in mine} - mine
        mine |= found
        grown = bool(found)
    return {pid: cpu[pid] for pid in mine if pid in cpu}


def private_bytes(pid: int) -> int:
    """Memory that the process shares with nobody."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except OSError:  # it ended
        return 0
    return (int(resident) - int(shared)) * PAGE


def num_files(folder: str) -> int:
    """Of the file system that is mounted at `folder`."""
    usage = os.statvfs(folder)
    return usage.f_files - usage.f_ffree


def clear_marks(folder: str) -> None:
    """Remove what a program can write on a folder of its own beside entries: extended attributes, which hold any text, and times."""
    try:
        for name in os.listxattr(folder):
            if name.startswith(OWNERS_ATTRIBUTES):
                os.removexattr(folder, name)
    except OSError as error:
        if error.errno != errno.ENOTSUP:  # a file system without them
            raise
    os.utime(folder, (0, 0))


def num_oom_kills() -> int:
    """How often the kernel killed in this container for memory."""
    for path in OOM_COUNTS:
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    return 0
