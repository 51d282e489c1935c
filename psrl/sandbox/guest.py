"""The process that serves one sandbox from the inside: forks a fresh process for every call and ends its whole tree.

On the standard library alone (Python 3.9 or newer). As `isolated` or `container` it is pid 1 of its own pid namespace: the kernel then
drops every signal that a program inside sends to it, and `kill(-1)` from here reaches every process there is. Being undumpable, it can be
neither traced nor read through /proc, and `guest_filter.py` refuses programs the calls that would change its limits. Each call gets its
own session, pipes, limits and no descriptor of the control stream (`guest_child.py`), so a program can print what looks like an answer but
never send one.

What a call costs is mostly the fork: copying the guest's page tables, and each page that guest or program then write. So the guest keeps
little in memory, and does little while the program lives.

Invariant: when an answer is sent, no process of the call is left. Frames: two big-endian uint32 (length of a JSON
header, length of the payload), then both. While a call runs, the host sends nothing, or closes the stream and the guest ends, or
sends one frame `{"op": "end", "why": ...}`, which ends the program and is given back as `killed_by`.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import itertools
import json
import os
import select
import signal
import stat
import struct
import sys
import time
from typing import Any

from guest_child import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, Child
from guest_filter import protect
from guest_kernel import LIBC, clear_marks, num_files, num_oom_kills, pidfd_of, posture, private_bytes, tree_of_calls
from guest_output import Collector

PACKAGES_FOLDER = "/opt/psrl/packages"
FRAME = struct.Struct("!II")
TICK_S = 0.05
"""How often memory, CPU and process count of the whole tree are summed."""
SHORT_S = 0.005
"""How long a program may be held up that fills its pipe at once."""
OUTPUT_KILL_FACTOR = 256
"""A program that prints this many times its cap is ended; reading it to its time limit would only burn CPU."""
MAX_FILES = 20_000
MAX_FILES_CLEANED = 2_000
"""More leftovers than this are removed by replacing the sandbox."""
PRELOADED = (
    "bisect", "collections", "cmath", "copy", "datetime", "decimal", "fractions", "functools", "heapq",
    "itertools", "math", "operator", "re", "string", "textwrap", "typing",
)  # fmt: skip
"""Not what costs each fork more than it costs the few programs that import it: `threading` and `random` act in every fork."""
decode_json, encode_json = json.JSONDecoder().raw_decode, json.JSONEncoder(check_circular=False).encode
PR_SET_CHILD_SUBREAPER = 36


class Guest:
    """One sandbox's server; handles one request at a time."""

    def __init__(
        self,
        control: tuple[int, int],
        *,
        mode: str,
        is_protected: bool,
        work: str,
        scratch: tuple[str, ...],
        child: Child,
    ) -> None:
        """`control` is read from and written to; programs start in `work`; `scratch` are folders in memory, emptied after each program.

        `mode`: `isolated`, `container` (the kernel bounds memory and processes of all programs together), or `shared`.
        `is_protected`: the filter of `guest_filter.py` holds for this process and all that it starts.
        """
        self._requests, self._answers = control
        self._is_isolated = mode != "shared"
        self._is_bounded = mode == "container"
        self._work = work
        self._scratch = scratch
        self._child = child
        self._is_protected = is_protected
        self._uid = os.geteuid()
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
        return None if header is None or payload is None else (decode_json(header.decode())[0], payload)

    def _receive(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            chunk = os.read(self._requests, min(size - len(parts), 1 << 20))
            if not chunk:
                return None
            parts += chunk
        return bytes(parts)

    def _send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        encoded = encode_json(header).encode()
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
        return self._is_isolated and not self._is_protected and bool(posture() != self._posture)

    def _send_tampered(self, request: dict[str, Any]) -> None:
        is_suspect = request["op"] == "program"
        self._send({"exit_code": None, "killed_by": "tampered", "dropped": 0, "run_s": 0.0, "stdout_size": 0, "is_suspect": is_suspect})

    def _call(self, request: dict[str, Any], payload: bytes) -> None:
        if self._is_tampered:
            self._send_tampered(request)
            return
        limits = request["limits"]
        code, typed = None, payload
        if request["op"] == "program":
            source, typed = payload[: request["code_bytes"]], payload[request["code_bytes"] :]
            code = source.decode("utf-8", "surrogatepass")
        bounds = self._child.bounds(limits)
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        err_cap = limits["output_bytes"] // 4
        out, err = Collector(out_read, limits["output_bytes"] - err_cap), Collector(err_read, err_cap)
        poll = select.poll()  # no selector of `selectors`: what the guest touches while the program lives is copied, page by page
        poll.register(self._requests, select.POLLIN)
        started = time.monotonic()
        oom_kills = num_oom_kills() if self._is_bounded else 0
        guest_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._child.become(request, code, typed, bounds, (out_write, err_write), guest_pid)
        os.close(out_write)
        os.close(err_write)
        killed_by = self._supervise(pid, poll, (out, err), limits, started)
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

    def _supervise(self, pid: int, poll: select.poll, streams: tuple[Collector, ...], limits: dict[str, Any], started: float) -> str | None:
        """Read output until the program ends (None) or breaks a limit (its name)."""
        deadline = started + limits["wall_s"]
        next_check = started + SHORT_S
        by_fd: dict[int, Collector] = {}
        pidfd = pidfd_of(pid)
        poll.register(pidfd, select.POLLIN)
        try:
            while True:
                now = time.monotonic()
                for fd, _ in poll.poll(max(0.0, 1000 * (min(next_check, deadline) - now))):
                    if fd == pidfd:
                        return None
                    if fd == self._requests:
                        return self._interruption()
                    if not by_fd[fd].read():
                        poll.unregister(fd)
                now = time.monotonic()
                if now >= deadline:
                    return "wall_time"
                if sum(stream.total for stream in streams) > OUTPUT_KILL_FACTOR * limits["output_bytes"]:
                    return "output"
                if not by_fd and now >= next_check:  # what a short program writes is read when it has ended
                    for stream in streams:
                        by_fd[stream.fd] = stream
                        poll.register(stream.fd, select.POLLIN)
                    next_check = started + TICK_S
                elif now >= next_check:
                    next_check = now + TICK_S
                    broken = self._broken_limit(limits)
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

    def _broken_limit(self, limits: dict[str, Any]) -> str | None:
        tree = tree_of_calls(is_isolated=self._is_isolated)
        if len(tree) > limits["num_processes"] + 1:
            return "processes"
        if sum(cpu_s for cpu_s in tree.values()) > limits["cpu_s"]:
            return "cpu_time"
        baseline = private_bytes(os.getpid())  # a fork begins with the guest's own
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
                status = os.stat(folder)
                if status.st_uid == self._uid:
                    if stat.S_IMODE(status.st_mode) != 0o700:
                        os.chmod(folder, 0o700)
                    clear_marks(folder)
                with os.scandir(folder) as entries:
                    first = next(entries, None)
                    if first is None:
                        continue
                    if self._is_isolated and num_files(folder) > MAX_FILES_CLEANED:
                        return False
                    for entry in itertools.chain((first,), entries):
                        if entry.is_dir(follow_symlinks=False):
                            importlib.import_module("shutil").rmtree(entry.path)
                        else:
                            os.unlink(entry.path)
            except (OSError, RecursionError):
                return False
        return True


def main(arguments: list[str]) -> None:
    """Take the control stream from descriptors 0 and 1 and serve. `arguments`: the mode, the work folder, scratch folders."""
    mode, work, *scratch = arguments
    os.environ.pop("LD_BIND_NOW", None)  # for this process, whose forks would each look up the same functions again
    is_protected = mode != "shared" and protect()
    if mode == "container":
        with contextlib.suppress(OSError):
            os.makedirs(work, exist_ok=True)
        if not os.access(work, os.W_OK | os.X_OK):
            sys.exit(f"the folder {work} cannot be written by uid {os.geteuid()}")
        os.chdir(work)
    control = (fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, 100), fcntl.fcntl(1, fcntl.F_DUPFD_CLOEXEC, 100))
    # Beside this file, which is not in a package inside the sandbox; in a container the host has loaded it.
    interpreter = importlib.import_module("guest_interpreter")
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    for fd in os.pipe():
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
    interpreter.prepare()
    for fd in (1, 2):
        os.dup2(null, fd)
    os.close(null)
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if mode == "shared":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The kernel protects pid 1 only from signals that it does not handle, and Python handles this one.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if mode != "container":  # a program sees its own modules only, not this folder
        del sys.path[0]
    if mode != "shared" and os.path.isdir(PACKAGES_FOLDER):
        sys.path.append(PACKAGES_FOLDER)
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    with contextlib.suppress(AttributeError):  # musl has none
        LIBC.malloc_trim(0)  # what compiling left: every page that is there makes each fork dearer
    gc.freeze()
    child = Child(mode=mode, work=work, run_program=interpreter.run_program)
    Guest(control, mode=mode, is_protected=is_protected, work=work, scratch=tuple(scratch), child=child).serve()
