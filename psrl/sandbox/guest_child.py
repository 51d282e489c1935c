"""What a fork of the guest does to become the program of a call: its session, descriptors, limits, and the program itself.

Whatever can be made before the fork is given to it: each page that is written after it is copied, and such copies cost more than all
else that happens here. Standard library only (Python 3.9 or newer): this file is copied into the sandbox.
"""

from __future__ import annotations

import _signal  # whose functions `signal` wraps in enumerations
import os
import resource
from collections.abc import Callable
from typing import Any

from guest_kernel import LIBC

PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
Bounds = list[tuple[int, tuple[int, int]]]
"""Resource limits, each with its soft and its hard bound."""


class Child:
    """How calls of one guest become programs."""

    def __init__(self, *, mode: str, work: str, run_program: Callable[[str, bool], int]) -> None:
        """`mode` and `work`: see `Guest`; `run_program` runs Python source and returns its exit code."""
        self._is_isolated = mode != "shared"
        self._is_bounded = mode == "container"
        self._work = work
        self._run_program = run_program

    def bounds(self, limits: dict[str, Any]) -> Bounds:
        """What the kernel holds of a call's limits."""
        bounds = {resource.RLIMIT_FSIZE: limits["disk_bytes"], resource.RLIMIT_CORE: 0}
        if not self._is_bounded:
            bounds.update({resource.RLIMIT_AS: limits["memory_bytes"], resource.RLIMIT_NOFILE: 256})
            if self._is_isolated:  # elsewhere the count is of all processes of the user
                bounds[resource.RLIMIT_NPROC] = limits["num_processes"] + 1
        cpu_s = int(max(1, -(-limits["cpu_s"] // 1)))
        return [*((kind, (bound, bound)) for kind, bound in bounds.items()), (resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))]

    def become(
        self, request: dict[str, Any], code: str | None, typed: bytes, bounds: Bounds, outputs: tuple[int, int], guest_pid: int
    ) -> None:
        """Never returns. In the fork: give up everything that is the guest's, then be the program: `code`, or the request's command."""
        stdout, stderr = outputs
        try:
            stdin = file_without_name(self._work, typed) if typed else os.open(os.devnull, os.O_RDONLY)
            os.setsid()
            for target, fd in enumerate((stdin, stdout, stderr)):
                os.dup2(fd, target)
            stderr = 2
            os.closerange(3, 65536)
            LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
            if not self._is_isolated:
                LIBC.prctl(PR_SET_PDEATHSIG, _signal.SIGKILL, 0, 0, 0)
                if os.getppid() != guest_pid:  # it died before it could be told apart from a parent that lives
                    os._exit(1)
            os.chdir(request.get("cwd") or self._work)
            if self._is_bounded:
                with open("/proc/self/oom_score_adj", "w") as file:  # short of memory, the kernel ends programs and not the guest
                    file.write("1000")
            for kind, bound in bounds:
                resource.setrlimit(kind, bound)
            if code is not None:
                _signal.signal(_signal.SIGINT, _signal.default_int_handler)
                os._exit(self._run_program(code, request["shows_last"]))
            _signal.signal(_signal.SIGPIPE, _signal.SIG_DFL)
            argv = request["argv"]
            try:
                os.execvpe(argv[0], argv, {**os.environ, **request["env"]})
            except (OSError, ValueError) as error:  # ValueError: a null byte or a lone surrogate in argv
                words = error.strerror if isinstance(error, OSError) else str(error)
                os.write(2, f"cannot run {argv[0]}: {words}\n".encode("utf-8", "backslashreplace"))
                os._exit(127)
        except (OSError, ValueError) as error:  # such as a stdin for which the disk has no room; ValueError: a null byte in `cwd`
            os.write(stderr, f"cannot start: {error}\n".encode("utf-8", "backslashreplace"))
        finally:  # the fork must not go on as a second guest, whatever failed
            os._exit(1)


def file_without_name(folder: str, content: bytes) -> int:
    """A descriptor of a new file that can be read from its start and found nowhere."""
    path = os.path.join(folder, os.urandom(16).hex())
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    os.unlink(path)
    while content:
        content = content[os.write(fd, content) :]
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
