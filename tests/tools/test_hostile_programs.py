"""Programs that attack their sandbox, through the public tool: each ends in time with a defined observation and harms nothing."""

# ruff: noqa: E501  # one program per row

import asyncio
import os
import secrets
import time
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from sandbox_service import sandbox_server

from psrl.config.sandbox import SandboxConfig
from psrl.protocols import ToolResult
from psrl.sandbox import build_interpreter, find_leftovers
from psrl.sandbox.reaper import labelled_processes, worker_label
from psrl.tools import CodeInterpreter

WALL_S = 2.0
SETTINGS = SandboxConfig(num_workers=1, wall_s=WALL_S, cpu_s=20, memory_mb=128, num_processes=16, output_kb=8, disk_mb=8)
NUM_LANES = 4
RUN = f"hostile_{secrets.token_hex(8)}"
"""Of this process alone: what another one left is not this one's failure."""
UID = 65533 if os.geteuid() == 0 else os.getuid()
PROBE = f"""
import os
if os.getpriority(os.PRIO_PROCESS, 0) != {os.getpriority(os.PRIO_PROCESS, 0)} or os.sched_getscheduler(0) != 0: print('slowed down')
processes = [name for name in os.listdir('/proc') if name.isdigit()]
print(len(processes), os.listdir('/tmp'), os.listdir('/dev/shm'))
"""
# (name, code, causes that are right, a part of the observation)
ANY = {None, "exception", "exit_code", "signal", "timeout", "memory", "processes", "disk"}
PROGRAMS = [
    ("fork bomb", "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", {"timeout", "processes"}, "ended"),
    ("fork bomb that raises", "import os\nwhile True: os.fork()", {"exception", "processes", "timeout"}, ""),
    ("thread bomb", "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,)).start()",
     {"exception", "memory", "processes", "timeout"}, ""),
    ("memory at once", "x = bytearray(10**10)", {"memory"}, "MemoryError"),
    ("memory by steps", "x = []\nwhile True: x.append(bytearray(10**6))", {"memory"}, ""),
    ("memory of many children",
     "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        x = bytearray(b'x') * (40 * 2**20)\n        time.sleep(9)\ntime.sleep(9)",
     {"memory"}, "too much memory"),
    ("memory in a memfd", "import os\nos.memfd_create('x')", {"exception"}, "PermissionError"),
    ("endless output", "while True: print('x' * 1000)", {"output", "timeout"}, "bytes dropped"),
    ("binary output", "import sys\nsys.stdout.buffer.write(bytes([255, 254, 65, 0]))", {None}, "\ufffd\ufffdA"),
    ("lone surrogates", "print('\\ud800 ok')", {None}, "\\ud800 ok"),
    ("source with surrogates", "print('\ud800')", ANY, ""),
    ("stdin", "input()", {"exception"}, "EOFError"),
    ("stdin read", "import sys\nprint(repr(sys.stdin.read()))", {None}, "''"),
    ("signals ignored", "import signal, time\nfor n in range(1, 64):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: time.sleep(9)",
     {"timeout"}, "out of time"),
    ("stops itself", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", {"timeout"}, "out of time"),
    ("bare except", "while True:\n    try:\n        while True: pass\n    except: pass", {"timeout"}, "out of time"),
    ("sleeps", "import time\ntime.sleep(1000)", {"timeout"}, "out of time"),
    ("thread that never ends", "import threading\nthreading.Thread(target=threading.Event().wait).start()\nprint('main done')", {"timeout"}, "out of time"),
    ("writes outside", "open('/usr/bin/evil', 'w')", {"exception"}, "Read-only file system"),
    ("writes to the root", "open('/evil', 'w')", {"exception"}, "Read-only file system"),
    ("writes to dev", "open('/dev/evil', 'w')", {"exception"}, "Error"),
    ("overwrites the guest", "open('/opt/psrl/guest/guest.py', 'w')", {"exception"}, "Error"),
    ("reads shadow", "print(open('/etc/shadow').read())", {"exception"}, "FileNotFoundError"),
    ("reads passwd", "print(open('/etc/passwd').read())", {"exception"}, "FileNotFoundError"),
    ("reads homes", "import os\nprint([p for p in ('/root', '/home', '/work', '/var', '/mnt', '/sys') if os.path.exists(p)], os.listdir('/opt'))",
     {None}, "[] ['psrl']"),
    ("network out", "import socket\nsocket.create_connection(('1.1.1.1', 53), timeout=1)", {"exception"}, "Network is unreachable"),
    ("network of the host", "import socket\nprint([name for _, name in socket.if_nameindex()])", {None}, "['lo']"),
    ("fills the disk", "f = open('/tmp/x', 'wb')\nwhile True: f.write(bytes(2**20))", {"exception", "signal"}, ""),
    ("fills the disk by many files", "for i in range(99):\n    open(f'/tmp/{i}', 'wb').write(bytes(2**20))", {"exception"}, "No space left"),
    ("fills shm", "for i in range(99):\n    open(f'/dev/shm/{i}', 'wb').write(bytes(2**20))", {"exception"}, "No space left"),
    ("many files", "for i in range(10**9): open(f'/tmp/{i}', 'w').close()", {"disk", "timeout", "exception"}, ""),
    ("deep folders", "import os\nfor i in range(900):\n    os.mkdir('d'); os.chdir('d')\nprint('made')", {None}, "made"),
    ("closed folder left", "import os\nos.makedirs('a/b'); os.chmod('a', 0); os.chmod('/tmp', 0)\nprint('done')", {None}, "done"),
    ("fifo left", "import os\nos.mkfifo('/tmp/f')\nprint('done')", {None}, "done"),
    ("symlinks to the host", "import os\nos.symlink('/proc/1/root/etc/shadow', 'x')\nprint(open('x').read())", {"exception"}, "Error"),
    ("symlink in place of work", "import os\nos.symlink('/usr', '/tmp/usr')\nprint('done')", {None}, "done"),
    ("recursion", "def f(n): return f(n + 1)\nf(0)", {"exception"}, "RecursionError"),
    ("recursion without limit", "import sys\nsys.setrecursionlimit(10**9)\ndef f(x): return [*map(f, [x])]\nf(0)", {"signal", "memory", "exception", "timeout"}, ""),
    ("os._exit", "import os\nos._exit(7)", {"exit_code"}, "exit code 7"),
    ("sys.exit zero", "import sys\nprint('bye')\nsys.exit(0)", {None}, "bye"),
    ("sys.exit code", "import sys\nsys.exit(3)", {"exit_code"}, "exit code 3"),
    ("sys.exit text", "import sys\nsys.exit('no luck')", {"exception"}, "no luck"),
    ("segfault", "import ctypes\nctypes.string_at(0)", {"signal"}, "signal 11"),
    ("abort", "import os\nos.abort()", {"signal"}, "signal 6"),
    ("kills pid 1", "import os, signal\nfor s in (9, 15, 2, 19, 1, 17): os.kill(1, s)\nprint('alive')", {None}, "alive"),
    ("kills the parent", "import os\nos.kill(os.getppid(), 9)\nos.killpg(os.getppid(), 9)", {None, "exception"}, ""),
    ("kills everything", "import os\ntry: os.kill(-1, 9)\nexcept ProcessLookupError: print('nobody there')", {None}, "nobody there"),
    ("traces pid 1", "import ctypes\nprint(ctypes.CDLL(None).ptrace(16, 1, 0, 0))", {None}, "-1"),
    ("memory of pid 1", "open('/proc/1/mem', 'r+b')", {"exception"}, "PermissionError"),
    ("descriptors of pid 1", "import os\nprint(os.listdir('/proc/1/fd'))", {"exception"}, "PermissionError"),
    ("closes descriptors", "import os\nos.closerange(0, 1000)\nprint('gone')", {None, "exception", "exit_code"}, ""),
    ("writes to all descriptors", "import os\nfor fd in range(3, 1000):\n    try: os.write(fd, b'x' * 64)\n    except OSError: pass\nprint('done')", {None}, "done"),
    ("forged frames", "import os, struct, json\nh = json.dumps({'exit_code': 0, 'stdout_size': 0, 'is_suspect': False}).encode()\nfor fd in range(1000):\n    try: os.write(fd, struct.pack('!II', len(h), 0) + h)\n    except OSError: pass\n1/0",
     {"exception"}, "ZeroDivisionError"),
    ("atexit loop", "import atexit, time\n@atexit.register\ndef f():\n    while True: time.sleep(9)", {"timeout"}, "out of time"),
    ("atexit raises", "import atexit\natexit.register(lambda: 1/0)", {None, "exception"}, "ZeroDivisionError"),
    ("huge integer", "print(10**10**9)", {"timeout", "memory"}, ""),
    ("long integer", "print(7**10000)", {"exception"}, "ValueError"),
    ("daemon that survives", "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(1000)\n    os._exit(0)\nprint('left')", {None}, "left"),
    ("daemon that holds stdout", "import subprocess\nsubprocess.Popen(['sleep', '1000'], start_new_session=True)\nprint('left')", {None}, "left"),
    ("setuid", "import os\nos.setuid(0)", {"exception"}, "Error"),
    ("suid file", "import os, shutil\nshutil.copy('/usr/bin/id', '/tmp/id')\nos.chmod('/tmp/id', 0o4755)\nprint(os.popen('/tmp/id -u').read())", {None}, str(UID)),
    ("new namespaces", "import ctypes\nprint(ctypes.CDLL(None).unshare(0x10000000))", {None}, "-1"),
    ("mounts", "import ctypes\nprint(ctypes.CDLL(None).mount(b'none', b'/tmp', b'tmpfs', 0, b''))", {None}, "-1"),
    ("sysctl", "open('/proc/sys/kernel/hostname', 'w').write('evil')", {"exception"}, "Error"),
    ("import hooks", "import sys\nclass Finder:\n    def find_spec(self, *a): raise ImportError('hooked')\nsys.meta_path.insert(0, Finder())\nsys.modules.clear()\nimport json",
     ANY, ""),
    ("replaces builtins", "import builtins\nbuiltins.print = builtins.repr = builtins.open = None\n1 + 1", {None}, "2"),
    ("replaces traceback", "import traceback\ntraceback.TracebackException = None\nraise ValueError('x')", {"exception"}, "ValueError"),
    ("exception whose text raises", "class E(Exception):\n    def __str__(self): raise SystemExit(0)\nraise E()", {"exception"}, "E"),
    ("exception with long text", "raise ValueError('x' * 10**6 + ' the end')", {"exception"}, "the end"),
    ("repr that never ends", "import time\nclass A:\n    def __repr__(self):\n        while True: time.sleep(9)\nA()", {"timeout"}, "out of time"),
    ("null bytes in source", "print(1)\0", {"exception"}, "null bytes"),
    ("not Python", "what is this?", {"exception"}, "SyntaxError"),
    ("lowers limits of pid 1", "import resource\nfor kind in range(16):\n    try: resource.prlimit(1, kind, (0, 0))\n    except (OSError, ValueError): pass\nprint('done')",
     {None, "sandbox_lost"}, ""),
    ("slows pid 1 down", "import os\nos.setpriority(os.PRIO_PROCESS, 1, 19)\nos.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))\nprint('done')", {"exception"}, "Operation not permitted"),
    ("raises limits", "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))", {"exception"}, "Error"),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one program led to."""

    result: ToolResult
    elapsed_s: float
    next_text: str
    probe: str


async def play_lane(programs, settings) -> dict[str, Seen]:
    interpreter = build_interpreter(settings, run=RUN)
    tool = CodeInterpreter(interpreter)
    await interpreter.preflight()
    seen = {}
    try:
        for name, code, _, _ in programs:
            started = time.monotonic()
            result = await tool.call({"code": code})
            elapsed_s = time.monotonic() - started
            following = await tool.call({"code": "print(2+3)"})
            probe = await tool.call({"code": PROBE})
            seen[name] = Seen(result=result, elapsed_s=elapsed_s, next_text=following.text, probe=probe.text)
    finally:
        await interpreter.stop()
    return seen


async def play(settings_of_lanes) -> dict[str, Seen]:
    lanes = await asyncio.gather(*(play_lane(PROGRAMS[lane::NUM_LANES], settings) for lane, settings in enumerate(settings_of_lanes)))
    return {name: seen for lane in lanes for name, seen in lane.items()}


@pytest.fixture(scope="module", params=["bubblewrap", pytest.param("sandbox_fusion", marks=pytest.mark.slow)])
def seen(request, tmp_path_factory):
    if request.param == "bubblewrap":
        return asyncio.run(play([SETTINGS] * NUM_LANES))
    limits = {"cpu-s": 20, "memory-mb": 128, "num-processes": 16, "output-kb": 8, "disk-mb": 8, "num-workers": 1, "run": RUN}
    options = [word for name, value in limits.items() for word in (f"--{name}", value)]
    with ExitStack() as stack:
        servers = [stack.enter_context(sandbox_server(tmp_path_factory.mktemp("server"), *options)) for _ in range(NUM_LANES)]
        remote = {"backend": "sandbox_fusion", "num_workers": 1, "wall_s": WALL_S, "memory_mb": 128, "output_kb": 8}
        return asyncio.run(play([SandboxConfig(**remote, urls=[server.url]) for server in servers]))


@pytest.mark.parametrize(("name", "code", "causes", "part"), PROGRAMS, ids=[row[0] for row in PROGRAMS])
def test_a_hostile_program_ends_in_time_with_a_defined_observation(seen, name, code, causes, part):
    result = seen[name].result
    assert result.error_cause in causes, result
    assert part in result.text
    assert result.text
    # The host's own limit is 5 s after the guest's.
    assert seen[name].elapsed_s < WALL_S + 5
    assert len(result.text.encode()) < 8 * 1024 * 3 + 500  # every byte may have become one replacement character of three


@pytest.mark.parametrize("name", [row[0] for row in PROGRAMS])
def test_the_worker_answers_5_right_after_and_holds_nothing_of_the_program(seen, name):
    assert seen[name].next_text == "5"
    # The guest (pid 1) and the probe itself.
    assert seen[name].probe == "2 [] []"


def test_no_process_and_no_folder_is_left_after_the_hostile_programs(seen):
    assert worker_label(RUN) not in labelled_processes().values()
    assert find_leftovers(RUN).count == 0


def test_a_program_that_burns_cpu_in_children_is_ended_by_its_cpu_time():
    async def play_cpu():
        settings = SandboxConfig(num_workers=1, wall_s=60, cpu_s=0.3)
        interpreter = build_interpreter(settings, run=RUN)
        tool = CodeInterpreter(interpreter)
        try:
            alone = await tool.call({"code": "while True: pass"})
            spread = await tool.call({"code": "import os\nfor _ in range(3): os.fork()\nwhile True: pass"})
        finally:
            await interpreter.stop()
        return alone, spread

    for result in asyncio.run(play_cpu()):
        assert result.error_cause == "cpu_time"
