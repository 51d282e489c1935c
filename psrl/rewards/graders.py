"""A pool of long-lived child processes that grade, each grading with a deadline.

Invariant: a child that missed its deadline, died, or whose caller went away is killed before its place is used again, so an answer
can never reach another question. Waiting for a free child ends because every holder has a deadline.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from psrl.errors import RewardError
from psrl.rewards.grading_worker import HEADER

STARTUP_TIMEOUT_S = 60.0
"""Importing a checker on a busy machine; not part of a grading's deadline."""
REAP_TIMEOUT_S = 10.0
MAX_ANSWER_BYTES = 2**24
"""The names of all tests of a large project come in one answer."""


class GraderLoadError(RewardError):
    """The child could not load its checker."""

    is_retryable = False


class GraderFailedError(RewardError):
    """The checker raised on what it was asked."""


class GraderSilentError(RewardError):
    """The child missed its deadline, died, or answered too much on what it was asked."""


class GraderPool:
    """Children of one kind. Lives in one event loop."""

    def __init__(self, *, arguments: Sequence[str], num_processes: int, timeout_s: float) -> None:
        """`arguments` are those of `grading_worker`. Children start when they are first needed."""
        self._arguments = tuple(arguments)
        self._timeout_s = timeout_s
        self._idle: list[_GradingChild] = []
        self._busy: set[_GradingChild] = set()
        self._places = asyncio.Semaphore(num_processes)
        self._is_closed = False

    async def grade(self, request: dict[str, Any]) -> dict[str, Any]:
        """The child's answer.

        Raises:
            GraderFailedError: The checker raised.
            GraderSilentError: The child died or missed the deadline.
            GraderLoadError: The checker cannot be loaded.
        """
        async with self._lend() as child:
            reply = await child.ask(request, timeout_s=self._timeout_s)
        if "error" in reply:
            raise GraderFailedError(f"the grader failed: {reply['error']}")
        return reply

    async def preload(self) -> None:
        """Have at least one child that loaded its checker.

        Raises:
            GraderLoadError: The checker cannot be loaded.
        """
        async with self._lend():
            pass

    @asynccontextmanager
    async def _lend(self) -> AsyncIterator[_GradingChild]:
        async with self._places:
            if self._is_closed:
                raise RewardError("the grader is closed")
            child = self._idle.pop() if self._idle else _GradingChild()
            self._busy.add(child)
            is_reusable = False
            try:
                await child.start(self._arguments)
                yield child
                is_reusable = True
            finally:
                self._busy.discard(child)
                if is_reusable and not self._is_closed:
                    self._idle.append(child)
                else:
                    child.kill()
                    await child.reap()

    async def close(self) -> None:
        """Kill every child, also one that is grading."""
        self._is_closed = True
        children = [*self._idle, *self._busy]
        self._idle.clear()
        for child in children:
            child.kill()
        for child in children:
            await child.reap()


class _GradingChild:
    """One process, in a session of its own so that what it starts dies with it."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, arguments: Sequence[str]) -> None:
        if self._process is not None:
            return
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "psrl.rewards.grading_worker", *arguments,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True, limit=MAX_ANSWER_BYTES,
        )  # fmt: skip
        hello = await self._read_answer(timeout_s=STARTUP_TIMEOUT_S)
        if "error" in hello:
            raise GraderLoadError(f"the grader cannot be loaded: {hello['error']}")

    async def ask(self, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        assert self._process is not None, "asked before the start"
        assert self._process.stdin is not None, "the child has no input pipe"
        body = pickle.dumps(request)
        self._process.stdin.write(HEADER.pack(len(body)) + body)
        try:
            return await self._read_answer(timeout_s=timeout_s)
        except RewardError as error:
            raise GraderSilentError(str(error)) from error

    async def _read_answer(self, *, timeout_s: float) -> dict[str, Any]:
        assert self._process is not None, "read before the start"
        assert self._process.stdout is not None, "the child has no output pipe"
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), timeout_s)
        except TimeoutError as error:
            raise RewardError(f"the grader gave no answer within {timeout_s:g} s and was killed") from error
        except ValueError as error:
            raise RewardError(f"the grader's answer is longer than {MAX_ANSWER_BYTES} bytes") from error
        if not line.endswith(b"\n"):
            raise RewardError("the grader died while grading")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def kill(self) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def reap(self) -> None:
        """The kill cannot be refused, so this waits only for the kernel."""
        if self._process is not None:
            await asyncio.wait_for(self._process.wait(), REAP_TIMEOUT_S)
