"""The contract of `Sandbox`, on every backend."""

import asyncio
import dataclasses
import errno
import os
import resource
import secrets
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from psrl.config.sandbox import SandboxConfig, engine_url_of
from psrl.config.sandbox_checks import check_sandbox
from psrl.config.tree import Config
from psrl.errors import ConfigError, SandboxError, SandboxUnavailableError
from psrl.sandbox import BackendSandboxes, bubblewrap, build_sandbox, find_leftovers
from psrl.sandbox.guest_sandbox import guest_source
from psrl.sandbox.leftover_containers import labelled_containers
from psrl.sandbox.reaper import labelled_processes, worker_label
from psrl.types import SandboxLimits, SandboxSpec

PACKAGE = Path(bubblewrap.__file__).parents[1]
RUN = f"contract_{secrets.token_hex(8)}"
"""Of this process alone: what another one left is not this one's failure."""
BACKENDS = ["bubblewrap", "docker", "process"]
LIMITS = SandboxLimits(wall_s=5.0, output_bytes=4096, memory_bytes=256 * 2**20, num_processes=16, disk_bytes=8 * 2**20)


def with_sandbox(backend, use, *, limits=LIMITS):
    """Run the coroutine function `use` on a started sandbox; nothing may be left afterwards."""

    async def play():
        sandbox = BackendSandboxes(SandboxConfig(backend=backend), run=RUN).make(SandboxSpec(limits=limits))
        await sandbox.start()
        try:
            return await use(sandbox)
        finally:
            await sandbox.stop()
            await sandbox.stop()

    outcome = asyncio.run(play())
    assert worker_label(RUN) not in labelled_processes().values()
    assert worker_label(RUN) not in labelled_containers(engine_url_of(SandboxConfig())).values()
    assert find_leftovers(RUN).count == 0
    return outcome


def run_argv(backend, *argv, limits=None, **options):
    async def use(sandbox):
        return await sandbox.run(argv, limits=limits, **options)

    return with_sandbox(backend, use)


def distinct_sleep():
    """A command line that no other process of this machine has, since `process` sees them all; and a pattern that finds it."""
    seconds = str(10**6 + secrets.randbelow(10**6))
    return f"sleep {seconds}", f"[s]leep {seconds}"


def open_for_all(folder):
    """Let every user enter a temporary folder of pytest's."""
    for path in [folder, *folder.parents]:
        if path.stat().st_uid == os.geteuid() and not path.stat().st_mode & stat.S_IXOTH:
            path.chmod(path.stat().st_mode | stat.S_IXOTH)


@pytest.fixture(params=BACKENDS)
def backend(request):
    if request.param == "docker":
        request.getfixturevalue("docker_engine")
    return request.param


def test_a_program_gives_its_output_and_its_exit_code(backend):
    result = run_argv(backend, "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (result.stdout, result.stderr, result.exit_code, result.killed_by) == (b"out\n", b"err\n", 3, None)


def test_stdin_and_environment_reach_the_program_and_nothing_else_does(backend, monkeypatch):
    monkeypatch.setenv("HOST_SECRET", "1")
    result = run_argv(backend, "sh", "-c", "cat; echo $GREETING; env | grep -c SECRET", stdin=b"typed\n", env={"GREETING": "hello"})
    assert result.stdout == b"typed\nhello\n0\n"


def test_large_stdin_arrives_whole(backend):
    assert run_argv(backend, "wc", "-c", stdin=b"x" * 300_000).stdout.split() == [b"300000"]


def test_a_command_that_does_not_exist_exits_with_127(backend):
    result = run_argv(backend, "no-such-command")
    assert result.exit_code == 127
    assert b"no-such-command" in result.stderr


def test_a_command_whose_folder_is_missing_exits_with_1_and_says_why(backend):
    result = run_argv(backend, "echo", "on", cwd="/not/there")
    assert (result.exit_code, result.stdout) == (1, b"")
    assert b"No such file or directory: '/not/there'" in result.stderr
    assert b"null byte" in run_argv(backend, "echo", "on", cwd="/not\0there").stderr


@pytest.mark.parametrize(("text", "cause"), [("echo \0", b"null byte"), ("echo \ud800", b"surrogates not allowed")])
def test_a_command_that_no_system_call_takes_exits_with_127_and_says_why(backend, text, cause):
    result = run_argv(backend, "sh", "-c", text)
    assert result.exit_code == 127
    assert cause in result.stderr


def test_files_written_are_read_back_and_seen_by_programs_until_stop(backend):
    async def use(sandbox):
        await sandbox.write("folder/a.bin", b"\x00\xff" * 1000)
        size = await sandbox.run(["sh", "-c", "wc -c < folder/a.bin; echo more > folder/b"])
        return await sandbox.read("folder/a.bin"), size.stdout, await sandbox.read("folder/b")

    content, size, other = with_sandbox(backend, use)
    assert content == b"\x00\xff" * 1000
    assert size.strip() == b"2000"
    assert other == b"more\n"


def test_reading_what_is_no_file_raises_and_the_sandbox_goes_on(backend):
    async def use(sandbox):
        await sandbox.run(["mkfifo", "pipe"])
        with pytest.raises(FileNotFoundError):
            await sandbox.read("missing")
        with pytest.raises(OSError, match="regular file"):
            await sandbox.read("pipe")
        for path in ("nu\0ll", "sur\ud800rogate"):
            with pytest.raises(OSError, match=r"null byte|surrogates"):
                await sandbox.read(path)
            with pytest.raises(OSError, match=r"null byte|surrogates"):
                await sandbox.write(path, b"")
        return (await sandbox.run(["echo", "on"])).stdout

    assert with_sandbox(backend, use) == b"on\n"


def test_a_time_out_ends_the_whole_tree(backend):
    sleep, pattern = distinct_sleep()

    async def use(sandbox):
        first = await sandbox.run(["sh", "-c", f"{sleep} & setsid {sleep} & {sleep}"], limits=SandboxLimits(wall_s=0.5))
        return first, await sandbox.run(["sh", "-c", f"ps -e -o args | grep -c '{pattern}'"])

    first, count = with_sandbox(backend, use)
    assert (first.exit_code, first.killed_by) == (None, "wall_time")
    assert 0.5 <= first.run_s < 4
    assert count.stdout.strip() == b"0"


def test_cpu_time_is_bounded_apart_from_wall_time(backend):
    result = run_argv(backend, "sh", "-c", "while :; do :; done", limits=SandboxLimits(wall_s=30, cpu_s=0.3))
    assert result.killed_by == "cpu_time"


def test_memory_is_bounded_over_all_processes(backend):
    # Each of the 6 holds 30 MiB, below the 128 MiB that bound one process; together they hold 180 MiB.
    child = "    if os.fork() == 0:\n        x = bytearray(b'x') * (30 * 2**20); time.sleep(30)\n"
    code = f"import os, time\nfor _ in range(6):\n{child}time.sleep(30)"
    result = run_argv(backend, "python3", "-c", code, limits=SandboxLimits(memory_bytes=128 * 2**20, wall_s=30))
    assert result.killed_by == "memory"


def test_long_output_keeps_head_and_tail_and_counts_what_is_dropped(backend):
    result = run_argv(backend, "sh", "-c", "echo head; head -c 100000 /dev/zero; echo tail")
    # stdout may keep 3/4 of 4096 bytes: 5 + 100000 + 5 - 3072 = 96938 are dropped.
    assert result.dropped_output_bytes == 96938
    assert result.stdout.startswith(b"head\n")
    assert result.stdout.endswith(b"tail\n")
    assert b"\n[... 96938 bytes dropped ...]\n" in result.stdout
    assert result.exit_code == 0


def test_output_without_end_is_ended(backend):
    assert run_argv(backend, "yes").killed_by in ("output", "wall_time")


def test_a_signal_is_named(backend):
    result = run_argv(backend, "sh", "-c", "kill -TERM $$")
    assert (result.exit_code, result.killed_by) == (None, "signal:15")


def test_a_program_that_leaves_children_returns_at_once_and_they_are_gone(backend):
    sleep, pattern = distinct_sleep()

    async def use(sandbox):
        first = await sandbox.run(["sh", "-c", f"{sleep} & echo done"])
        return first, await sandbox.run(["sh", "-c", f"ps -e -o args | grep -c '{pattern}'"])

    first, count = with_sandbox(backend, use)
    assert (first.stdout, first.exit_code) == (b"done\n", 0)
    assert first.run_s < 4
    assert count.stdout.strip() == b"0"


def test_a_stopped_sandbox_refuses_calls(backend):
    async def play():
        sandbox = build_sandbox(SandboxConfig(backend=backend), run=RUN)
        await sandbox.start()
        await sandbox.stop()
        with pytest.raises(SandboxError, match="not running"):
            await sandbox.run(["true"])

    asyncio.run(play())


def test_a_sandbox_of_a_worker_with_a_thousand_open_files_stops(backend):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(2048, hard)), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        assert run_argv(backend, "echo", "on").stdout == b"on\n"
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_cancelled_call_kills_its_sandbox(backend):
    async def play():
        sandbox = build_sandbox(SandboxConfig(backend=backend), run=RUN)
        await sandbox.start()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await sandbox.run(["sleep", "99"])
        with pytest.raises(SandboxError, match="not running"):
            await sandbox.run(["true"])
        await sandbox.stop()

    asyncio.run(play())
    assert worker_label(RUN) not in labelled_processes().values()


# ---------------------------------------------------------------- the guest's own limits: where there is isolation

CHANGES = {
    "files": "resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))",
    "processes": "resource.prlimit(1, resource.RLIMIT_NPROC, (0, 0))",
    "cpu": "resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))",
    "priority": "os.setpriority(os.PRIO_PROCESS, 1, 19)",
    "group": "os.setpriority(os.PRIO_PGRP, 1, 19)",
    "user": "os.setpriority(os.PRIO_USER, 0, 19)",
    "cores": "os.sched_setaffinity(1, {0})",
    "scheduler": "os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
    "memory": "open('/proc/1/oom_score_adj', 'w').write('1000')",
}
TRY_EACH = "import os, resource\n" + "".join(
    f"try:\n    {change}\n    print('{name}')\nexcept OSError:\n    pass\n" for name, change in CHANGES.items()
)
"""Prints what could be changed."""
OWN = """
import os, resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
resource.prlimit(os.getpid(), resource.RLIMIT_NOFILE, (32, 32))
before = os.getpriority(os.PRIO_PROCESS, 0)
os.setpriority(os.PRIO_PROCESS, 0, before + 1)
os.setpriority(os.PRIO_PROCESS, os.getpid(), before + 2)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], os.getpriority(os.PRIO_PROCESS, 0) - before, len(os.sched_getaffinity(0)))
"""


@pytest.mark.parametrize("isolated", ["bubblewrap", "docker"])
def test_a_program_can_change_limits_and_scheduling_of_its_own_and_nothing_of_the_guests(isolated, docker_engine):
    async def use(sandbox):
        tried = await sandbox.run(["python3", "-c", TRY_EACH])
        return tried, await sandbox.run(["python3", "-c", OWN]), await sandbox.run_program(TRY_EACH), await sandbox.run_program(OWN)

    for index, result in enumerate(with_sandbox(isolated, use)):
        assert result.stderr == b""
        assert (result.stdout, result.exit_code, result.killed_by) == ((b"", b"32 2 1\n")[index % 2], 0, None)


def test_where_the_kernels_numbers_are_not_known_a_guest_that_was_changed_is_named_and_never_an_error(monkeypatch):
    def source(name):
        text = guest_source(name)
        return text + b"\nARCHITECTURES = {}\n" if name == "guest_filter.py" else text

    async def use(sandbox):
        await sandbox.write("file", b"kept")
        return [await sandbox.run(["python3", "-c", code]) for code in ("print(1)", f"import os, resource; {CHANGES['files']}", "print(2)")]

    monkeypatch.setattr(bubblewrap, "guest_source", source)
    results = with_sandbox("bubblewrap", use)
    assert [(result.exit_code, result.killed_by) for result in results] == [(0, None), (None, "tampered"), (None, "tampered")]


def test_a_guest_that_somebody_outside_moves_to_other_cores_is_no_fault_of_its_programs(backend):
    async def use(sandbox):
        before = await sandbox.run(["true"])
        guests = [pid for pid, label in labelled_processes().items() if label == worker_label(RUN)]
        for pid in guests:
            os.sched_setaffinity(pid, {min(os.sched_getaffinity(pid))})
        return guests, before, await sandbox.run(["echo", "on"])

    guests, before, after = with_sandbox(backend, use)
    assert guests
    assert (before.exit_code, after.stdout, after.exit_code, after.killed_by) == (0, b"on\n", 0, None)


def test_an_unknown_backend_is_a_config_error_with_the_known_ones():
    with pytest.raises(ConfigError, match="bubblewrap, docker, process, sandbox_fusion"):
        build_sandbox(SandboxConfig(backend="virtual_machine"))


# ---------------------------------------------------------------- isolation: bubblewrap only


def test_the_host_is_not_visible():
    result = run_argv("bubblewrap", "sh", "-c", "ls /; ls -d /home /root /sys /etc/passwd")
    assert set(result.stdout.split()) <= {b"bin", b"dev", b"etc", b"lib", b"lib32", b"lib64", b"libx32", b"opt", b"proc", b"tmp", b"usr"}
    assert result.stderr.count(b"No such file") == 4


def test_the_program_is_an_unprivileged_user_without_capabilities():
    result = run_argv("bubblewrap", "sh", "-c", "id -u; grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status")
    uid = "65533" if os.geteuid() == 0 else str(os.getuid())
    assert result.stdout.decode().split() == [uid, "CapEff:", "0" * 16, "CapBnd:", "0" * 16, "NoNewPrivs:", "1"]


def test_the_disk_is_bounded_and_memory_files_are_refused():
    result = run_argv("bubblewrap", "sh", "-c", "head -c 9000000 /dev/zero > big; wc -c < big")
    assert int(result.stdout) <= 8 * 2**20


def test_a_stdin_for_which_the_disk_has_no_room_is_named():
    result = run_argv("bubblewrap", "true", stdin=b"x" * (2 * LIMITS.disk_bytes))
    assert result.exit_code == 1
    assert b"No space left on device" in result.stderr


def test_a_fork_bomb_stays_within_its_count():
    code = "import os\nn = 0\ntry:\n    while os.fork(): n += 1\n    os.read(os.pipe()[0], 1)\nexcept OSError: print(n)"
    result = run_argv("bubblewrap", "python3", "-c", code)
    # 16 and the guest, of which one is the program itself.
    assert int(result.stdout) <= 16


@pytest.mark.parametrize("row", [False, True])
def test_there_is_no_network_and_none_of_this_machines_sockets_whatever_a_row_asks(row):
    abstract = f"psrl-{secrets.token_hex(8)}"
    with socket.socket() as loopback, socket.socket(socket.AF_UNIX) as named:
        loopback.bind(("127.0.0.1", 0))
        loopback.listen()
        named.bind(f"\0{abstract}")
        named.listen()
        connect = "import socket, sys\ns = socket.socket(int(sys.argv[1]))\nprint(s.connect_ex({}))"

        async def use(sandbox):
            interfaces = await sandbox.run(["ls", "/proc/sys/net/ipv4/conf"])
            inet = await sandbox.run(["python3", "-c", connect.format(loopback.getsockname()), str(int(socket.AF_INET))])
            unix = await sandbox.run(["python3", "-c", connect.format(repr(f"\0{abstract}")), str(int(socket.AF_UNIX))])
            return interfaces.stdout.split(), int(inet.stdout), int(unix.stdout)

        limits = dataclasses.replace(LIMITS, allow_network=row)
        found = with_sandbox("bubblewrap", use, limits=limits)
    assert found == ([b"all", b"default", b"lo"], errno.ECONNREFUSED, errno.ECONNREFUSED)


@pytest.mark.parametrize("closed", ["bubblewrap", "process"])
def test_where_the_network_is_the_machines_own_a_run_that_opens_it_is_refused(closed):
    config = Config()
    config.sandbox = SandboxConfig(backend=closed, allow_network=True)
    with pytest.raises(ConfigError, match=r"this machine's own.*sandbox\.backend=docker"):
        check_sandbox(config)
    sandboxes = BackendSandboxes(config.sandbox)
    with pytest.raises(ConfigError, match=r"this machine's own.*sandbox\.backend=docker"):
        sandboxes.make(SandboxSpec(limits=SandboxLimits(allow_network=True)))


def test_without_bwrap_the_error_names_the_fix(monkeypatch):
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: None)
    with pytest.raises(SandboxUnavailableError, match="apt-get install bubblewrap"):
        asyncio.run(build_sandbox(SandboxConfig()).start())


def test_where_namespaces_are_refused_the_error_has_the_cause_and_the_fix(tmp_path, monkeypatch):
    # What bwrap says and does where unprivileged user namespaces are off.
    refusing = tmp_path / "bwrap"
    refusing.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    refusing.chmod(0o755)
    open_for_all(tmp_path)
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: str(refusing))
    with pytest.raises(SandboxUnavailableError, match=r"No permissions to create.*unprivileged_userns_clone"):
        asyncio.run(build_sandbox(SandboxConfig()).start())


def test_starting_and_stopping_leaves_no_descriptor_open(backend):
    def num_descriptors():
        return len(os.listdir("/proc/self/fd"))

    async def play():
        counts = []
        sandboxes = BackendSandboxes(SandboxConfig(backend=backend), run=RUN)  # a worker's one, which keeps connections to an Engine
        for _ in range(3):
            sandbox = sandboxes.make(SandboxSpec(limits=LIMITS))
            await sandbox.start()
            await sandbox.run(["true"])
            await sandbox.stop()
            counts.append(num_descriptors())
        return counts

    counts = asyncio.run(play())
    assert counts[1] == counts[2]


NORMAL_USER = """
import asyncio, os
from psrl.config.sandbox import SandboxConfig
from psrl.sandbox import build_interpreter

if os.geteuid() == 0:
    os.setgroups([]), os.setgid(1234), os.setuid(1234)

async def play():
    interpreter = build_interpreter(SandboxConfig(num_workers=1, num_processes=8))
    await interpreter.preflight()
    bomb = await interpreter.run_program("import os\\nwhile True: os.fork()")
    uid = await interpreter.run_program("import os; os.getuid()")
    print(b"BlockingIOError" in bomb.stderr, int(uid.stdout) == os.getuid() != 0)
    await interpreter.stop()

asyncio.run(play())
"""


def test_a_normal_user_gets_the_same_sandbox(tmp_path):
    # The checkout may lie in a folder that only root can enter.
    subprocess.run(["cp", "-r", PACKAGE, tmp_path / "psrl"], check=True)
    subprocess.run(["chmod", "-R", "a+rX", tmp_path], check=True)
    open_for_all(tmp_path)
    argv = [sys.executable, "-c", NORMAL_USER]
    done = subprocess.run(argv, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["True", "True"], done.stderr
