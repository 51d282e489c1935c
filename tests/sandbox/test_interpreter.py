"""What a program sees and shows in the interpreter, on every backend that it runs on by itself; and the pool around it."""

import ast
import asyncio
import os
import secrets
import signal
import types

import pytest

from psrl.config.sandbox import SandboxConfig
from psrl.errors import SandboxError, SandboxUnavailableError
from psrl.sandbox import build_interpreter
from psrl.sandbox.guest_interpreter import PROGRAM, compiled
from psrl.sandbox.reaper import labelled_processes

RUN = f"interpreter_{secrets.token_hex(8)}"
"""Of this process alone, as those below."""


@pytest.fixture(params=["bubblewrap", "process", "sandbox_fusion"])
def backend(request):
    """Settings that choose it."""
    urls = [request.getfixturevalue("sandbox_service")] if request.param == "sandbox_fusion" else []
    return {"backend": request.param, "urls": urls}


def run_programs(*codes, **settings):
    """Results of programs run one after the other in a pool."""

    async def play():
        interpreter = build_interpreter(SandboxConfig(**{"num_workers": 1, "wall_s": 5.0, **settings}), run=RUN)
        try:
            return [await interpreter.run_program(code) for code in codes]
        finally:
            await interpreter.stop()

    return asyncio.run(play())


# (code, stdout): what Python's own interactive prompt or script would show.
SHOWN = [
    ("print(2+3)", "5\n"),
    ("2+3", "5\n"),
    ("x = 2\nx * 21", "42\n"),
    ("'text'", "'text'\n"),
    ("None", ""),
    ("print(1)\nprint(2)", "1\n2\n"),
    ("x = 5", ""),
    ("for i in range(2): i", ""),
    ("if True:\n    7", ""),
    ("[1, 2].sort()", ""),
    ("def f():\n    return 3\nf()", "3\n"),
    ("import math\nmath.sqrt(16)  # a comment", "4.0\n"),
    ("(1,\n 2)", "(1, 2)\n"),
    ("a = 1; a + 1", "2\n"),
    ("lambda: 0, 1\n3", "3\n"),
    ("x: int = 3\nx", "3\n"),
    ("print('a', end='')", "a"),
    ("'multi' 'ple'", "'multiple'\n"),
    ("", ""),
    ("# only a comment", ""),
    ("print('é ∑')", "é ∑\n"),
    ("__name__", "'__main__'\n"),
    ("x = [\n1,\n2]\nx", "[1, 2]\n"),
    ("x = 1 + \\\n5", ""),
    ("'''a\n5'''", "'a\\n5'\n"),
    ("x: int = 3\n__annotations__", "{'x': <class 'int'>}\n"),
    ("import os\n'LD_BIND_NOW' in os.environ or os.popen('env | grep LD_').read()", "''\n"),
    ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\nA(1)", "A(x=1)\n"),
    ("import pickle\nclass A: pass\ntype(pickle.loads(pickle.dumps(A()))).__name__", "'A'\n"),
    ("import threading\nt = threading.Thread(target=lambda: print('late'))\nt.start()", "late\n"),
    ("from multiprocessing import Pool\ndef f(x): return x * x\nwith Pool(2) as p: print(p.map(f, [1, 2, 3]))", "[1, 4, 9]\n"),
]


def test_a_last_expression_is_shown_by_repr_and_nothing_is_wrapped_in_print(backend):
    results = run_programs(*(code for code, _ in SHOWN), **backend)
    for (code, stdout), result in zip(SHOWN, results, strict=True):
        assert (result.stdout.decode(), result.stderr, result.exit_code) == (stdout, b"", 0), code


SPLIT = [
    "", "5", "\n5\n\n",
    "# c", "x = 1\n2  # c", "x = 1;x", "x = \\\n5", "'\\\n5'", "(\n5)", "print(\n1\n)", "if 1:\n  2\n3", "if x:\n  2\nelse: 3",
    "try:\n  1\nexcept E: 2\n5", "a\r\nb", "a\r1\nb", "1\n\f5", "a\n*a,", "(y := 5)", "y := 5", "yield 5", "'doc'", "'doc'\n5", "x: int\nx",
    "5\\", "5\xa0", "from __future__ import annotations\nx: int\nx", "a\n(lambda:\n0)", "a\nlambda: 0", "return 5\nawait x\n", "'''a\n5",
]  # fmt: skip


def test_a_program_is_split_before_its_last_expression_as_its_syntax_tree_is():
    def by_tree(text):
        tree = ast.parse(text, PROGRAM)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        statements = compile(tree, PROGRAM, "exec")
        return statements, None if last is None else compile(ast.Expression(last.value), PROGRAM, "eval")

    def all_of(code):
        consts = [all_of(const) if isinstance(const, types.CodeType) else const for const in code.co_consts]
        return code.co_code, code.co_names, list(code.co_lines()), consts

    def outcome(split, text):
        try:
            return [part and all_of(part) for part in split(text)]
        except SyntaxError as error:
            return str(error)

    for text in SPLIT:
        assert outcome(lambda text: compiled(text, True), text) == outcome(by_tree, text), text


def test_calls_share_neither_variables_nor_modules_nor_files_nor_processes(backend):
    first, second = run_programs(
        "import math, os, builtins\nmath.pi = 3\nbuiltins.leak = 1\nopen('left', 'w').close()\n"
        "os.environ['LEAK'] = '1'\nx = 1\nos.getpid()",
        "import math, os, builtins\n"
        "print(math.pi, hasattr(builtins, 'leak'), os.listdir('.'), 'LEAK' in os.environ, 'x' in globals())\nos.getpid()",
        **backend,
    )
    shown, pid = second.stdout.decode().splitlines()
    assert shown == "3.141592653589793 False [] False False"
    assert pid != first.stdout.decode().strip()


def test_a_program_can_leave_no_mark_on_the_folders_that_it_may_write(backend):
    first, second = run_programs(
        "import os\nos.setxattr('.', 'user.note', b'x')\nos.utime('.', (12345, 12345))\nos.listxattr('.'), os.stat('.').st_mtime",
        "import os\nos.listxattr('.'), 12345 in (os.stat('.').st_atime, os.stat('.').st_mtime)",
        **backend,
    )
    assert first.stdout == b"(['user.note'], 12345.0)\n"
    assert second.stdout == b"([], False)\n"


def test_a_traceback_has_the_programs_frames_only_and_always_its_last_line(backend):
    (result,) = run_programs("import json\ndef load(text):\n    return json.loads(text)\nload('{')", **backend)
    lines = result.stderr.decode().splitlines()
    assert result.exit_code == 1
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("json.decoder.JSONDecodeError: ")
    assert [line.strip() for line in lines if line.strip().startswith("File")] == [
        'File "<program>", line 4, in <module>',
        'File "<program>", line 3, in load',
    ]


def test_a_syntax_error_names_the_line(backend):
    (result,) = run_programs("x = 1\ny = = 2", **backend)
    assert 'File "<program>", line 2' in result.stderr.decode()
    assert result.stderr.decode().splitlines()[-1] == "SyntaxError: invalid syntax"


def test_random_numbers_differ_between_calls(backend):
    first, second = run_programs(*["import random\nrandom.random()"] * 2, **backend)
    assert first.stdout != second.stdout


def test_waiting_for_a_free_sandbox_is_not_run_time(backend):
    async def play():
        interpreter = build_interpreter(SandboxConfig(num_workers=1, **backend), run=RUN)
        await interpreter.start()
        try:
            return await asyncio.gather(interpreter.run_program("import time\ntime.sleep(0.5)"), interpreter.run_program("1"))
        finally:
            await interpreter.stop()

    first, second = asyncio.run(play())
    assert first.queue_s < 0.4
    assert second.queue_s >= 0.5
    assert second.run_s < first.run_s


def test_more_callers_than_sandboxes_are_all_answered_by_their_own_program(backend):
    async def play():
        interpreter = build_interpreter(SandboxConfig(num_workers=3, **backend), run=RUN)
        try:
            return await asyncio.gather(*(interpreter.run_program(f"print({number})") for number in range(60)))
        finally:
            await interpreter.stop()

    assert [int(result.stdout) for result in asyncio.run(play())] == list(range(60))


@pytest.mark.parametrize("backend", ["bubblewrap", "process"])
def test_a_sandbox_that_is_killed_from_outside_is_replaced_and_the_program_run_again(backend):
    run = f"killed_outside_{secrets.token_hex(8)}"

    async def play():
        interpreter = build_interpreter(SandboxConfig(num_workers=1, backend=backend), run=run)
        await interpreter.start()
        call = asyncio.create_task(interpreter.run_program("import time\ntime.sleep(0.5)\n'done'"))
        await asyncio.sleep(0)  # the call has been sent once the task has run up to its first wait
        for pid, label in labelled_processes().items():
            if label.startswith(f"{run}."):
                os.kill(pid, signal.SIGKILL)
        try:
            return await call
        finally:
            await interpreter.stop()

    assert asyncio.run(play()).stdout == b"'done'\n"


def test_a_program_that_kills_the_guest_of_the_process_backend_is_answered_and_the_guest_replaced():
    killed, following = run_programs("import os\nos.kill(os.getppid(), 9)\nimport time\ntime.sleep(9)", "print(2+3)", backend="process")
    assert killed.killed_by == "sandbox_lost"
    assert following.stdout == b"5\n"


def test_a_caller_that_is_cancelled_gives_its_sandbox_back(backend):
    async def play():
        interpreter = build_interpreter(SandboxConfig(num_workers=1, **backend), run=RUN)
        await interpreter.start()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await interpreter.run_program("import time\ntime.sleep(99)")
        try:
            return await interpreter.run_program("print(2+3)")
        finally:
            await interpreter.stop()

    assert asyncio.run(play()).stdout == b"5\n"


def test_preflight_says_what_came_instead_of_5(backend):
    async def play():
        interpreter = build_interpreter(SandboxConfig(num_workers=1, wall_s=1e-6, **backend), run=RUN)
        try:
            await interpreter.preflight()
        finally:
            await interpreter.stop()

    with pytest.raises(SandboxUnavailableError, match=r"must print 5.*Fix"):
        asyncio.run(play())


def test_stop_refuses_callers_that_wait_and_the_one_that_runs_and_leaves_nothing(backend):
    run = f"stopped_{secrets.token_hex(8)}"

    async def play():
        interpreter = build_interpreter(SandboxConfig(num_workers=1, **backend), run=run)
        await interpreter.start()
        calls = [asyncio.create_task(interpreter.run_program("import time\ntime.sleep(99)")) for _ in range(4)]
        await asyncio.sleep(0)
        await interpreter.stop()
        async with asyncio.timeout(10):
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
        await interpreter.stop()
        return outcomes

    outcomes = asyncio.run(play())
    assert [type(outcome) for outcome in outcomes] == [SandboxError] * 4
    assert not [label for label in labelled_processes().values() if label.startswith(f"{run}.")]


def test_a_sandbox_that_is_being_replaced_while_the_pool_stops_is_not_left():
    run = f"replaced_{secrets.token_hex(8)}"

    def processes():
        return [pid for pid, label in labelled_processes().items() if label.startswith(f"{run}.")]

    async def play():
        interpreter = build_interpreter(SandboxConfig(num_workers=1), run=run)
        await interpreter.start()
        for pid in processes():
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            while processes():  # noqa: ASYNC110  (ended by the kernel)
                await asyncio.sleep(0)
        call = asyncio.create_task(interpreter.run_program("1"))
        await asyncio.sleep(0)  # the call now waits for the end of the dead sandbox, before it starts it again
        await interpreter.stop()
        await asyncio.gather(call, return_exceptions=True)

    asyncio.run(play())
    assert not processes()


@pytest.mark.slow
def test_at_least_100_calls_per_second():
    async def play():
        interpreter = build_interpreter(SandboxConfig(num_workers=2), run=RUN)
        await interpreter.preflight()
        started = asyncio.get_running_loop().time()
        results = await asyncio.gather(*(interpreter.run_program("print(2+3)") for _ in range(300)))
        elapsed_s = asyncio.get_running_loop().time() - started
        await interpreter.stop()
        assert {result.stdout for result in results} == {b"5\n"}
        return 300 / elapsed_s

    assert asyncio.run(play()) >= 100
