"""The program of a grading child: reads pickled requests, answers JSON lines, until its input ends.

The parent kills it at a deadline, so nothing here needs one. It grades in its main thread (checkers use signals), and what a
checker prints goes nowhere near the answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import math
import os
import pickle
import resource
import signal
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

HEADER = struct.Struct("<I")
"""Bytes of the pickled request that follows."""
MATH_MEMORY_BYTES = 4 * 2**30
_PR_SET_PDEATHSIG = 1

Grade = Callable[[dict[str, Any]], dict[str, Any]]


def main(argv: list[str]) -> None:
    """`math`, `test_log`, or `custom FILE FUNCTION`."""
    _die_with_parent()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        grade = KINDS[argv[0]](*argv[1:])
    except Exception as error:  # noqa: BLE001  (named in tests/test_limits.py)
        _answer(answers, {"error": f"{type(error).__name__}: {error}"})
        return
    _answer(answers, {"ready": True})
    while (request := _read(sys.stdin.buffer)) is not None:
        try:
            reply = grade(request)
        except Exception as error:  # noqa: BLE001  (named in tests/test_limits.py)
            reply = {"error": f"{type(error).__name__}: {error}"}
        _answer(answers, reply)


def _die_with_parent() -> None:
    """A checker in an endless loop never sees that its input ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _read(stream: BinaryIO) -> dict[str, Any] | None:
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    request: dict[str, Any] = pickle.loads(stream.read(HEADER.unpack(header)[0]))
    return request


def _answer(stream: Any, reply: dict[str, Any]) -> None:
    stream.write(json.dumps(reply) + "\n")
    stream.flush()


def _math_grader() -> Grade:
    from math_verify import parse, verify

    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (MATH_MEMORY_BYTES, MATH_MEMORY_BYTES))

    def grade(request: dict[str, Any]) -> dict[str, Any]:
        """Own time limits of math-verify are off: it would report a time-out as a wrong answer."""
        truth = parse(f"${request['truth']}$", parsing_timeout=None)
        answer = parse(f"${request['answer']}$", parsing_timeout=None)
        return {"equal": bool(verify(truth, answer, timeout_seconds=None))}

    grade({"truth": r"\frac{1}{2}", "answer": "0.5"})  # loads the parser, which takes seconds, before any deadline runs
    return grade


def _custom_grader(path: Path, name: str) -> Grade:
    spec = importlib.util.spec_from_file_location("psrl_custom_reward", path)
    assert spec is not None, f"{path} is no Python file"
    assert spec.loader is not None, f"{path} has no loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    compute_score = getattr(module, name)

    def grade(request: dict[str, Any]) -> dict[str, Any]:
        return _custom_reply(compute_score(**request))

    return grade


def _custom_reply(returned: Any) -> dict[str, Any]:
    """A number, or a dictionary with `score` and any further numbers."""
    values = returned if isinstance(returned, dict) else {"score": returned}
    if "score" not in values:
        raise TypeError(f"returned a dictionary without 'score': {sorted(map(str, values))}")
    score = float(values["score"])
    if not math.isfinite(score):
        raise ValueError(f"returned the score {score}")
    rest = {str(name): value for name, value in values.items() if name != "score"}
    parts = {name: float(value) for name, value in rest.items() if isinstance(value, bool | int | float) and math.isfinite(value)}
    return {"score": score, "parts": parts}


def _test_log_grader() -> Grade:
    from psrl.rewards.suite_logs import load_parsers, read_log

    parsers = load_parsers()
    return lambda request: read_log(parsers, request)


KINDS: dict[str, Callable[..., Grade]] = {
    "math": _math_grader,
    "test_log": _test_log_grader,
    "custom": lambda path, name: _custom_grader(Path(path), name),
}


if __name__ == "__main__":
    main(sys.argv[1:])
