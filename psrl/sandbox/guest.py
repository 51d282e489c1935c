"""The process that serves one sandbox from the inside: forks a fresh process for every call and ends its whole tree.

Runs as a script, on the standard library alone (Python 3.9 or newer). As `isolated` or `container` it is pid 1 of its own pid
namespace: the kernel then drops every signal that a program inside sends to it, and `kill(-1)` from here reaches every process
there is. Being undumpable, it can be neither traced nor read through /proc, and `guest_filter.py` refuses programs the calls that would
change its limits. Each call gets its own session, pipes, limits
and no descriptor of the control stream, so a program can print what looks like an answer but never send one.

Invariant: when an answer is sent, no process of the call is left. Frames: two big-endian uint32 (length of a JSON
header, length of the payload), then both. While a call runs, the host sends nothing, or closes the stream and the guest ends, or
sends one frame `{"op": "end", "why": ...}`, which ends the program and is given back as `killed_by`.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import resource
import selectors
import shutil
import signal
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

from guest_filter import guest_filter, protect
from guest_kernel import LIBC, num_files, num_oom_kills, pidfd_of, posture, private_bytes, tree_of_calls
from guest_output import Collector

PACKAGES_FOLDER = "/opt/psrl/packages"
FRAME = struct.Struct("!II")
TICK_S = 0.05
"""How often memory, CPU and process count of the whole tree are summed."""
OUTPUT_KILL_FACTOR = 256
"""A program that prints this many times its cap is ended; reading it to its time limit would only burn CPU."""
MAX_FILES = 20_000
MAX_FILES_CLEANED = 2_000
"""More leftovers than this are removed by replacing the sandbox."""
PRELOADED = (
    "bisect", "collections", "cmath", "copy", "dataclasses", "datetime", "decimal", "fractions", "functools", "heapq",
    "itertools", "math", "operator", "random", "re", "statistics", "string", "textwrap", "typing",
)  # fmt: skip
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36


class Guest:
    """One sandbox's server; handles one request at a time."""

    def __init__(
        self, control: tuple[int, int], *, mode: str, work: str, scratch: tuple[str, ...], run_program: Callable[[str, bool], int]
    ) -> None:
        """`control` is read from and written to; programs start in `work`; `scratch` are folders in memory, emptied after each program.

        `mode`: `isolated`, `container` (the kernel bounds memory and processes of all programs together), or `shared`.
        """
        self._requests, self._answers = control
        self._is_isolated = mode != "shared"
        self._is_bounded = mode == "container"
        self._work = work
        self._scratch = scratch
        self._run_program = run_program
        self._filter = guest_filter(os.getpid()) if self._is_isolated else None
        self._posture = posture()

    def serve(self) -> None:
        """Consumes requests until the host closes the socket; waits for nothing else between calls."""
        self._send({"ready": True})
        answers = {"program": self._call, "command": self._call, "read": self._read, "write": self._write, "empty": self._empty}
        while True:
            received = self._next()
            if received is None:
                return
            request, payload = received
            if request["op"] == "end":  # for a program that ended by itself meanwhile
                continue
            is_call = request["op"] in ("program", "command")
            try:
                answers[request["op"]](request, payload)
            except OSError as error:
                if is_call and self._is_tampered:
                    self._send_tampered(request)
                else:
                    self._send({"errno": error.errno or 5, "message": str(error), "is_suspect": is_call})
            except ValueError as error:  # a path that no system call takes: a null byte, a lone surrogate
                self._send({"errno": 22, "message": str(error), "is_suspect": False})

    def _next(self) -> tuple[dict[str, Any], bytes] | None:
        """The next frame; None once the host has closed the stream."""
        frame = self._receive(FRAME.size)
        if frame is None:
            return None
        header_size, payload_size = FRAME.unpack(frame)
        header, payload = self._receive(header_size), self._receive(payload_size)
        return None if header is None or payload is None else (json.loads(header), payload)

    def _receive(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            chunk = os.read(self._requests, min(size - len(parts), 1 << 20))
            if not chunk:
                return None
            parts += chunk
        return bytes(parts)

    def _send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        encoded = json.dumps(header).encode()
        frame = memoryview(FRAME.pack(len(encoded), len(payload)) + encoded + payload)
        while frame:
            frame = frame[os.write(self._answers, frame) :]

    # ------------------------------------------------------------ files

    def _read(self, request: dict[str, Any], _payload: bytes) -> None:
        # Opening a FIFO that a program left would block for ever without O_NONBLOCK.
        fd = os.open(os.path.join(self._work, request["path"]), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(22, "not a regular file")
            self._send({}, file.read(request["max_bytes"]))

    def _write(self, request: dict[str, Any], payload: bytes) -> None:
        path = os.path.join(self._work, request["path"])
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        with os.fdopen(fd, "wb") as file:
            file.write(payload)
        self._send({})

    def _empty(self, _request: dict[str, Any], _payload: bytes) -> None:
        self._send({"is_suspect": not self._clean()})

    # ------------------------------------------------------------ calls

    @property
    def _is_tampered(self) -> bool:
        """Whether a program has changed the guest itself: what went wrong since is the program's own.

        Where a filter holds it was somebody outside, such as an orchestrator that moves containers to other cores.
        """
        return self._is_isolated and self._filter is None and bool(posture() != self._posture)

    def _send_tampered(self, request: dict[str, Any]) -> None:
        is_suspect = request["op"] == "program"
        self._send({"exit_code": None, "killed_by": "tampered", "dropped": 0, "run_s": 0.0, "stdout_size": 0, "is_suspect": is_suspect})

    def _call(self, request: dict[str, Any], payload: bytes) -> None:
        if self._is_tampered:
            self._send_tampered(request)
            return
        limits = request["limits"]
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        err_cap = limits["output_bytes"] // 4
        out, err = Collector(out_read, limits["output_bytes"] - err_cap), Collector(err_read, err_cap)
        started = time.monotonic()
        oom_kills = num_oom_kills() if self._is_bounded else 0
        guest_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._run_child(request, payload, out_write, err_write, guest_pid)
        os.close(out_write)
        os.close(err_write)
        killed_by = self._supervise(pid, (out, err), limits, started)
        status, cpu_s = self._end_tree(pid)
        for stream in (out, err):
            while stream.read():
                pass
            os.close(stream.fd)
        run_s = time.monotonic() - started
        if killed_by is None and self._is_bounded and num_oom_kills() > oom_kills:
            killed_by = "memory"
        exit_code = None
        if killed_by is None and os.WIFEXITED(status):
            exit_code = os.WEXITSTATUS(status)
        elif killed_by is None:
            number = os.WTERMSIG(status)
            is_cpu = number == signal.SIGXCPU or (number == signal.SIGKILL and cpu_s >= limits["cpu_s"])
            killed_by = "cpu_time" if is_cpu else f"signal:{number}"
        is_suspect = request["op"] == "program" and not request["keeps_files"] and not self._clean()
        if self._is_tampered:
            exit_code, killed_by = None, "tampered"
        stdout, stderr = out.kept(), err.kept()
        answer = {
            "exit_code": exit_code, "killed_by": killed_by, "dropped": out.dropped + err.dropped, "run_s": run_s,
            "stdout_size": len(stdout), "is_suspect": is_suspect,
        }  # fmt: skip
        self._send(answer, stdout + stderr)

    def _supervise(self, pid: int, streams: tuple[Collector, ...], limits: dict[str, Any], started: float) -> str | None:
        """Read output until the program ends (None) or breaks a limit (its name)."""
        deadline = started + limits["wall_s"]
        next_check = started + TICK_S
        baseline = private_bytes(os.getpid())
        pidfd = pidfd_of(pid)
        with selectors.DefaultSelector() as selector:
            selector.register(pidfd, selectors.EVENT_READ)
            selector.register(self._requests, selectors.EVENT_READ)
            for stream in streams:
                selector.register(stream.fd, selectors.EVENT_READ, stream)
            try:
                while True:
                    now = time.monotonic()
                    ready = selector.select(max(0.0, min(next_check, deadline) - now))
                    for key, _ in ready:
                        if key.fd == pidfd:
                            return None
                        if key.fd == self._requests:
                            return self._interruption()
                        if not key.data.read():
                            selector.unregister(key.fd)
                    now = time.monotonic()
                    if now >= deadline:
                        return "wall_time"
                    if sum(stream.total for stream in streams) > OUTPUT_KILL_FACTOR * limits["output_bytes"]:
                        return "output"
                    if now >= next_check:
                        next_check = now + TICK_S
                        broken = self._broken_limit(limits, baseline)
                        if broken is not None:
                            return broken
            finally:
                os.close(pidfd)

    def _interruption(self) -> str:
        received = self._next()
        if received is None or received[0]["op"] != "end":  # nobody waits for this program any more; pid 1 takes all with it
            os._exit(0)
        why: str = received[0]["why"]
        return why

    def _broken_limit(self, limits: dict[str, Any], baseline: int) -> str | None:
        tree = tree_of_calls(is_isolated=self._is_isolated)
        if len(tree) > limits["num_processes"] + 1:
            return "processes"
        if sum(cpu_s for cpu_s in tree.values()) > limits["cpu_s"]:
            return "cpu_time"
        if sum(max(0, private_bytes(pid) - baseline) for pid in tree) > limits["memory_bytes"]:
            return "memory"
        if self._is_isolated and any(num_files(folder) > MAX_FILES for folder in self._scratch):
            return "disk"
        return None

    def _end_tree(self, pid: int) -> tuple[int, float]:
        """Kill and reap every process of the call: wait status and CPU seconds of the first one."""
        status, cpu_s = 0, 0.0
        while True:
            try:
                ended, ended_status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return status, cpu_s
            if ended == pid:
                status, cpu_s = ended_status, usage.ru_utime + usage.ru_stime
            elif ended == 0 and self._is_isolated:
                self._kill(-1)
                time.sleep(0.0005)
            elif ended == 0:  # a plain tree may fork while it is walked: again, until nothing is left
                for member in tree_of_calls(is_isolated=self._is_isolated):
                    self._kill(member)
                time.sleep(0.0005)

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _clean(self) -> bool:
        """Empty the scratch folders; False if that cannot be done or the guest was tampered with: the sandbox must be replaced."""
        if posture() != self._posture:
            return False
        for folder in self._scratch:
            try:
                if os.stat(folder).st_uid == os.geteuid():
                    os.chmod(folder, 0o700)
                if self._is_isolated and num_files(folder) > MAX_FILES_CLEANED:
                    return False
                with os.scandir(folder) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            shutil.rmtree(entry.path)
                        else:
                            os.unlink(entry.path)
            except (OSError, RecursionError):
                return False
        return True

    # ------------------------------------------------------------ the child

    def _run_child(self, request: dict[str, Any], payload: bytes, out_write: int, err_write: int, guest_pid: int) -> None:
        """Never returns. In the fork: give up everything that is the guest's, then be the program."""
        stderr = err_write
        try:
            stdin = os.open(os.devnull, os.O_RDONLY)
            is_program = request["op"] == "program"
            typed = payload[request["code_bytes"] :] if is_program else payload
            if typed:
                with tempfile.TemporaryFile(dir=self._work) as file:
                    file.write(typed)
                    file.flush()
                    os.dup2(file.fileno(), stdin)
                os.lseek(stdin, 0, os.SEEK_SET)
            os.setsid()
            for target, fd in enumerate((stdin, out_write, err_write)):
                os.dup2(fd, target)
            stderr = 2
            os.closerange(3, 65536)
            LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
            if not self._is_isolated:
                LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != guest_pid:  # it died before it could be told apart from a parent that lives
                    os._exit(1)
            os.chdir(request.get("cwd") or self._work)
            self._limit(request["limits"])
            if self._filter is not None:
                protect(self._filter)
            if is_program:
                signal.signal(signal.SIGINT, signal.default_int_handler)
                code = payload[: request["code_bytes"]].decode("utf-8", "surrogatepass")
                os._exit(self._run_program(code, request["shows_last"]))
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
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

    def _limit(self, limits: dict[str, Any]) -> None:
        cpu_s = max(1, -(-limits["cpu_s"] // 1))
        bounds = {resource.RLIMIT_FSIZE: limits["disk_bytes"], resource.RLIMIT_CORE: 0}
        if self._is_bounded:
            with open("/proc/self/oom_score_adj", "w") as file:  # short of memory, the kernel ends programs and not the guest
                file.write("1000")
        else:
            bounds.update({resource.RLIMIT_AS: limits["memory_bytes"], resource.RLIMIT_NOFILE: 256})
            if self._is_isolated:  # elsewhere the count is of all processes of the user
                bounds[resource.RLIMIT_NPROC] = limits["num_processes"] + 1
        for kind, bound in bounds.items():
            resource.setrlimit(kind, (bound, bound))
        resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s), int(cpu_s) + 1))


def main(arguments: list[str]) -> None:
    """Take the control stream from descriptors 0 and 1 and serve. `arguments`: the mode, the work folder, scratch folders."""
    mode, work, *scratch = arguments
    if mode == "container":
        with contextlib.suppress(OSError):
            os.makedirs(work, exist_ok=True)
        if not os.access(work, os.W_OK | os.X_OK):
            sys.exit(f"the folder {work} cannot be written by uid {os.geteuid()}")
        os.chdir(work)
    control = (fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 100), fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 100))
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if mode == "shared":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The kernel protects pid 1 only from signals that it does not handle, and Python handles this one.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Beside this file, which is not in a package inside the sandbox; in a container the host has loaded it.
    run_program: Callable[[str, bool], int] = importlib.import_module("guest_interpreter").run_program
    if mode != "container":  # a program sees its own modules only, not this folder
        del sys.path[0]
    if mode != "shared" and os.path.isdir(PACKAGES_FOLDER):
        sys.path.append(PACKAGES_FOLDER)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    Guest(control, mode=mode, work=work, scratch=tuple(scratch), run_program=run_program).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
