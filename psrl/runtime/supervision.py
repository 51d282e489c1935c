"""Nothing waits without an end: deadlines that name what they waited for, and one watch over every process of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from ray.exceptions import RayActorError, RayError, RayTaskError

from psrl.errors import DeadlineError, ProcessDiedError, PsrlError

Result = TypeVar("Result")


async def answer_of(what: str, awaitable: Awaitable[Result], deadline_s: float) -> Result:
    """What another process (or thread) answers, or an error with a name.

    Args:
        what: The unit in flight and who holds it, such as "step 3 in train worker 0".
        awaitable: A coroutine or a Ray reference.
        deadline_s: Seconds.

    Raises:
        DeadlineError: It did not end in time.
        ProcessDiedError: The process that worked on it died.
        PsrlError: What the process raised.
    """
    try:
        return await asyncio.wait_for(_as_coroutine(awaitable), deadline_s)
    except TimeoutError as error:
        raise DeadlineError(f"{what} did not end within {deadline_s:g} s") from error
    except RayActorError as error:
        raise ProcessDiedError(f"{what}: the process died: {first_line(error)}") from error
    except RayTaskError as error:
        raise cause_of(what, error) from error
    except RayError as error:
        raise ProcessDiedError(f"{what}: Ray failed: {first_line(error)}") from error


def cause_of(what: str, error: RayTaskError) -> PsrlError:
    """The psrl error that a remote call raised, or its text."""
    if isinstance(error.cause, PsrlError):
        return error.cause
    if isinstance(error.cause, RayActorError):
        return ProcessDiedError(f"{what}: a process that it needed died: {first_line(error.cause)}")
    return ProcessDiedError(f"{what} failed: {type(error.cause).__name__}: {error.cause}\n{error.traceback_str}")


def first_line(error: BaseException) -> str:
    """The part of Ray's long messages that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


class Supervisor:
    """Watches processes by name; ends when the first of them does."""

    def __init__(self) -> None:
        self._watched: dict[str, Awaitable[None]] = {}

    def watch(self, name: str, until_death: Awaitable[None]) -> None:
        """Add a process: `until_death` never returns while it lives."""
        self._watched[name] = until_death

    async def run(self) -> None:
        """Wait for the first death.

        Consumes nothing; waits for any watched process to end; unblocked by its death, or cancelled at the end of the run.

        Raises:
            ProcessDiedError: Names the process and its last words.
        """
        tasks = {asyncio.create_task(_as_coroutine(awaitable), name=name) for name, awaitable in self._watched.items()}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
        for task in done:
            error = task.exception()
            if isinstance(error, RayTaskError):
                raise ProcessDiedError(f"{task.get_name()}: {first_line(error.cause)}") from error
            raise ProcessDiedError(f"{task.get_name()} died: {first_line(error) if error else 'it ended'}") from error


async def _as_coroutine(awaitable: Awaitable[Result]) -> Result:
    return await awaitable
