"""Runs one Python program in the fork that `guest.py` made for it, and shows its last expression or its traceback.

Standard library only (Python 3.9 or newer): this file is copied into the sandbox. The value of a last statement that is an
expression is shown by `repr` unless it is None; nothing is ever wrapped in a print. Tracebacks keep the program's
own frames, and always their last line.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import linecache
import os
import sys
import threading
import traceback
import types
from typing import Any

PROGRAM = "<program>"
MAX_FRAMES = 8


def run_program(code: str, shows_last: bool = True) -> int:
    """Run Python source as `__main__`, and show the value of a last expression unless told not to; returns the exit code."""
    stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    vars(sys).update(stdout=stdout, __stdout__=stdout, stderr=stderr, __stderr__=stderr)
    sys.argv = [PROGRAM]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    linecache.cache[PROGRAM] = (len(code), None, code.splitlines(True), PROGRAM)
    # Taken before the program can replace them.
    write, show, finish = stdout.write, repr, (vars(threading)["_shutdown"], atexit._run_exitfuncs)
    exit_code = 0
    try:
        tree = ast.parse(code, PROGRAM)
        last = tree.body[-1] if tree.body and shows_last else None
        if isinstance(last, ast.Expr):
            tree.body.pop()
        exec(compile(tree, PROGRAM, "exec"), main.__dict__)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), PROGRAM, "eval"), main.__dict__)
            if value is not None:
                write(show(value) + "\n")
    except BaseException as error:  # noqa: BLE001  # whatever the program raises is its output
        exit_code = report(error, stdout, stderr)
    for step in finish:
        try:
            step()
        except BaseException as error:  # noqa: BLE001  # whatever the program raises is its output
            exit_code = exit_code or report(error, stdout, stderr)
    for stream in (stdout, stderr):
        with contextlib.suppress(OSError, ValueError):  # the program closed its descriptor
            stream.flush()
    return exit_code


def report(error: BaseException, stdout: Any, stderr: Any) -> int:
    """Print what ended the program, with the program's own frames only; returns the exit code."""
    try:
        stdout.flush()
        if isinstance(error, SystemExit):
            if error.code is None or isinstance(error.code, int):
                return (error.code or 0) & 0xFF
            stderr.write(f"{error.code}\n")
            return 1
        story = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
        keep_program_frames(story)
        stderr.write("".join(story.format()))
        stderr.flush()
    except BaseException:  # noqa: BLE001
        # Out of memory, a closed stream, an exception whose text raises: the kind is still told.
        os.write(2, type(error).__name__.encode("utf-8", "replace") + b"\n")
    return 1


def keep_program_frames(story: traceback.TracebackException) -> None:
    """Drop frames of the guest and of libraries, in the causes too."""
    pending: list[traceback.TracebackException | None] = [story]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.stack = traceback.StackSummary.from_list([f for f in one.stack if f.filename == PROGRAM][-MAX_FRAMES:])
        pending += [one.__cause__, one.__context__, *(getattr(one, "exceptions", None) or ())]
