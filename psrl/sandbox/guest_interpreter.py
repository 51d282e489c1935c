"""Runs one Python program in the fork that `guest.py` made for it, and shows its last expression or its traceback.

Standard library only (Python 3.9 or newer): this file is copied into the sandbox. The value of a last statement that is an
expression is shown by `repr` unless it is None; nothing is ever wrapped in a print. Tracebacks keep the program's
own frames, and always their last line.
"""

from __future__ import annotations

import ast
import atexit
import linecache
import os
import sys
import traceback
import types
from typing import Any

PROGRAM = "<program>"
MAX_FRAMES = 8


def prepare() -> None:
    """Make what every program finds: an empty `__main__`, and text streams on 0, 1 and 2, of which 1 and 2 must be pipes already."""
    stdout = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    vars(sys).update(stdout=stdout, __stdout__=stdout, stderr=stderr, __stderr__=stderr)
    sys.argv = [PROGRAM]
    sys.modules["__main__"] = types.ModuleType("__main__")


def run_program(code: str, shows_last: bool = True) -> int:
    """Run Python source as `__main__`, and show the value of a last expression unless told not to; returns the exit code."""
    main, stdout, stderr = sys.modules["__main__"], sys.stdout, sys.stderr
    linecache.cache[PROGRAM] = (len(code), None, code.splitlines(True), PROGRAM)
    write, show = stdout.write, repr  # taken before the program can replace them
    exit_code = 0
    try:
        statements, last = compiled(code, shows_last)
        exec(statements, main.__dict__)
        if last is not None:
            value = eval(last, main.__dict__)
            if value is not None:
                write(show(value) + "\n")
    except BaseException as error:  # noqa: BLE001  # whatever the program raises is its output
        exit_code = report(error, stdout, stderr)
    for step in (end_threads, atexit._run_exitfuncs):
        try:
            step()
        except BaseException as error:  # noqa: BLE001  # whatever the program raises is its output
            exit_code = exit_code or report(error, stdout, stderr)
    for stream in (stdout, stderr):
        try:  # noqa: SIM105
            stream.flush()
        except (OSError, ValueError):  # the program closed its descriptor
            pass
    return exit_code


def compiled(code: str, shows_last: bool) -> tuple[types.CodeType, types.CodeType | None]:
    """The program without its last expression, and that expression; the whole program and None where it has none that is to be shown."""
    if not shows_last:
        return compile(code, PROGRAM, "exec", dont_inherit=True), None
    head, line_end, line = code.rstrip("\n ").rpartition("\n")
    head += line_end
    if line and not line[0].isspace() and "\r" not in head:
        # Where both parts can be read alone, they are the statements. Most programs are such, and a syntax tree costs more than they do.
        try:
            last = compile("\n" * head.count("\n") + line, PROGRAM, "eval", dont_inherit=True)  # at its own line number
            return compile(head, PROGRAM, "exec", dont_inherit=True), last
        except SyntaxError:
            pass
    tree = compile(code, PROGRAM, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    shown = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    statements = compile(tree, PROGRAM, "exec", dont_inherit=True)
    return statements, None if shown is None else compile(ast.Expression(shown.value), PROGRAM, "eval", dont_inherit=True)


def end_threads() -> None:
    """Wait for the threads of a program that has any: it has imported the module, not loaded before since it acts in every fork."""
    if "threading" in sys.modules:
        vars(sys.modules["threading"])["_shutdown"]()


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
