"""Nothing waits without an end: deadlines that name what they waited for, and one watch over every process of the run."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Never, TypeVar

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from psrl.errors import ActorDiedError, DeadlineError, ProcessDiedError, PsrlError

Result = TypeVar("Result")

LOOK_S = 1.0
"""Between two looks at an actor."""
SILENT_AFTER_S = 30.0
"""A process that answers nothing for so long is taken as dead; a busy machine makes a live one wait for some seconds."""
END_OF_TASKS_S = 5.0
GRACE_FOR_THE_FOUNDATION_S = 1.5
"""After the first loss, until what was lost before it is looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Something that the driver waits for."""

    what: str
    """And who holds it."""
    began_s: float
    """`time.monotonic`."""
    deadline_s: float


class UnitsInFlight:
    """What the driver waits for now: every `answer_of` that has not ended."""

    def __init__(self) -> None:
        self._units: dict[int, Unit] = {}
        self._numbers = itertools.count()
        self.num_ended = 0
        """Since the program's start: the measure of progress."""

    @contextmanager
    def unit(self, what: str, deadline_s: float) -> Iterator[None]:
        """In flight while the body runs."""
        number = next(self._numbers)
        self._units[number] = Unit(what=what, began_s=time.monotonic(), deadline_s=deadline_s)
        try:
            yield
        finally:
            del self._units[number]
            self.num_ended += 1

    def oldest(self) -> list[Unit]:
        """All of them, the oldest first."""
        return sorted(self._units.values(), key=lambda unit: unit.began_s)


UNITS = UnitsInFlight()
"""Of this process."""


async def answer_of(what: str, awaitable: Awaitable[Result], deadline_s: float) -> Result:
    """What another process (or thread) answers, or an error with a name. It is among the units in flight meanwhile.

    Args:
        what: The unit in flight and who holds it, such as "step 3 in train worker 0".
        awaitable: A coroutine or a Ray reference.
        deadline_s: Seconds.

    Raises:
        PsrlError: See `look_of`.
    """
    with UNITS.unit(what, deadline_s):
        return await look_of(what, awaitable, deadline_s)


async def look_of(what: str, awaitable: Awaitable[Result], deadline_s: float | None) -> Result:
    """As `answer_of`, for what is no work of the run: pings, loads, and watches (None: they end with their subject).

    Raises:
        DeadlineError: It did not end in time.
        ActorDiedError: The process that worked on it died.
        ProcessDiedError: A process that it needed died, or it failed for a reason that is no error of psrl's.
        PsrlError: What the process raised.
    """
    try:
        return await asyncio.wait_for(_as_coroutine(awaitable), deadline_s)
    except TimeoutError as error:
        raise DeadlineError(f"{what} did not end within {deadline_s:g} s") from error
    except RayTaskError as error:  # first: Ray makes one that is also an instance of its cause, which may be another actor's death
        raise cause_of(what, error) from error
    except RayActorError as error:
        raise ActorDiedError(f"{what}: the process died: {first_line(error)}") from error
    except RayError as error:
        raise ProcessDiedError(f"{what}: Ray failed: {first_line(error)}") from error


def cause_of(what: str, error: RayTaskError) -> PsrlError:
    """The psrl error that a remote call raised, or its text."""
    if isinstance(error.cause, PsrlError):
        return error.cause
    if isinstance(error.cause, RayActorError):
        return ProcessDiedError(f"{what}: a process that it needed died: {first_line(error.cause)}")
    return ProcessDiedError(f"{what} failed: {type(error.cause).__name__}: {error.cause}\n{error}")


def first_line(error: BaseException) -> str:
    """The part of Ray's long messages that says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and "creation task" in lines[0]:
        return f"{lines[0].partition(',')[0]}: {lines[-1]}"  # the exception stands below its traceback
    return lines[0] if lines else type(error).__name__


class Suspicion:
    """That an actor is dead or broken, and why; whoever watches it looks at once."""

    def __init__(self) -> None:
        self._raised = asyncio.Event()
        self.why: str | None = None

    def raise_(self, why: str) -> None:
        """The first reason is kept."""
        self.why = self.why or why
        self._raised.set()

    def drop(self) -> None:
        """It is another actor now."""
        self.why = None
        self._raised.clear()

    async def within(self, timeout_s: float) -> None:
        """Until it is raised, or for `timeout_s`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._raised.wait(), timeout_s)


def ping_of(actor: ray.actor.ActorHandle) -> Awaitable[None]:
    """A call to an actor of psrl's."""
    return actor.alive.remote()  # type: ignore[no-any-return]


async def end_of(
    actor: ray.actor.ActorHandle,
    *,
    ping: Callable[[ray.actor.ActorHandle], Awaitable[object]] = ping_of,
    suspicion: Suspicion | None = None,
    silent_after_s: float = SILENT_AFTER_S,
) -> str:
    """Why an actor cannot be used any more: its process ended, answered nothing for `silent_after_s`, or is suspected. Never returns
    while it can.

    Consumes nothing. Waits for: the answer to a call, once a second and when `suspicion` is raised. Unblocked by: the actor's answer,
    its death, or the limit.
    """
    suspicion = suspicion or Suspicion()
    while True:
        try:
            await look_of("ping", ping(actor), silent_after_s)
        except DeadlineError:
            return f"it answered nothing for {silent_after_s:g} s"
        except ActorDiedError as error:
            return str(error).removeprefix("ping: the process died: ")
        except PsrlError as error:
            return str(error)
        if suspicion.why is not None:
            return suspicion.why
        await suspicion.within(LOOK_S)


async def first_done(works: Iterable[Coroutine[Any, Any, Result]], *, grace_s: float = 0.0) -> Result:
    """What the first of several gives, or, of those that end within `grace_s` after it, the one that was named first.

    The others are cancelled. Unblocked by the first that ends, however it ends.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if grace_s and not tasks[0].done():
            await asyncio.wait(tasks[:1], timeout=grace_s)
        return next(task for task in tasks if task.done()).result()
    finally:
        await end_tasks(tasks, END_OF_TASKS_S)


async def end_tasks(tasks: Iterable[asyncio.Task[Any]], timeout_s: float) -> None:
    """Cancel what still runs and wait for its end, `timeout_s` at most; what they raise is not of interest any more."""
    ending = set(tasks)
    for task in ending:
        task.cancel()
    if ending:
        done, _ = await asyncio.wait(ending, timeout=timeout_s)
        for task in done:
            if not task.cancelled():
                task.exception()


class Supervisor:
    """Watches processes by name, and keeps those that may be started again; ends when the first of them is lost."""

    def __init__(self) -> None:
        self._watched: dict[str, Coroutine[Any, Any, str]] = {}
        self._kept: dict[str, Coroutine[Any, Any, Never]] = {}

    def watch(self, name: str, end: Coroutine[Any, Any, str]) -> None:
        """Add a process whose end is the run's: `end` gives its cause and never returns while it lives. Those added first are
        looked at first when several ended together."""
        self._watched[name] = end

    def keep(self, name: str, keeping: Coroutine[Any, Any, Never]) -> None:
        """Add what starts a process again; it raises when the process is given up."""
        self._kept[name] = keeping

    async def run(self) -> Never:
        """Wait for the first process that is lost.

        Consumes nothing; waits for any of them to be lost; unblocked by that, or cancelled at the end of the run.

        Raises:
            ProcessDiedError: Names the process and the cause.
        """
        watching = {asyncio.create_task(_as_coroutine(end), name=name): name for name, end in self._watched.items()}
        keeping = {asyncio.create_task(_as_coroutine(keep), name=name): name for name, keep in self._kept.items()}
        try:
            await asyncio.wait({*watching, *keeping}, return_when=asyncio.FIRST_COMPLETED)
            # What the others lean on (Ray, say) is often found to be gone a moment later.
            await asyncio.wait(watching, timeout=GRACE_FOR_THE_FOUNDATION_S)
            for task, name in watching.items():
                if task.done():
                    raise ProcessDiedError(f"{name} died: {task.result()}")
            raise next(iter(error for task in keeping if task.done() and (error := task.exception()) is not None))
        finally:
            await end_tasks((*watching, *keeping), END_OF_TASKS_S)


async def _as_coroutine(awaitable: Awaitable[Result]) -> Result:
    return await awaitable
