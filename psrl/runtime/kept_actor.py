"""An actor of the run that is started again when it dies, so that whoever holds the `KeptActor` need not learn a new handle."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Never

import psutil
import ray

from psrl.errors import ActorDiedError, DeadlineError, ProcessDiedError, PsrlError
from psrl.processes.kept import RestartHistory, RestartLimit
from psrl.runtime.supervision import Suspicion, answer_of, end_of, first_done, look_of, ping_of

GRACE_FOR_THE_WATCH_S = 0.5
Died = Callable[[str, str], None]
"""Is told which process died and is started again, and why."""
Make = Callable[[], ray.actor.ActorHandle]
Prepare = Callable[[ray.actor.ActorHandle], Awaitable[object]]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptLimits:
    """How long and how often."""

    restarts: RestartLimit
    startup_s: float
    """Of one start."""
    silent_after_s: float
    """An actor that answers nothing for so long is taken as dead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorProcess:
    """Where an actor lives."""

    node: str
    pid: int
    began: float
    """As psutil tells it: a pid may be given out again."""

    def __str__(self) -> str:
        return f"pid {self.pid}"

    @staticmethod
    def of(_: object) -> ActorProcess:
        """To be called in the actor."""
        process = psutil.Process()
        return ActorProcess(node=ray.get_runtime_context().get_node_id(), pid=process.pid, began=process.create_time())

    def kill(self) -> None:
        """End it where it is on this node and still there."""
        if self.node == ray.get_runtime_context().get_node_id():
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(self.pid)
                if process.create_time() == self.began:
                    process.kill()


class KeptActor:
    """One place of the run, through the actors that fill it in turn.

    Invariant: `handle` is an actor that may be used exactly while `is_up`.
    """

    def __init__(
        self,
        name: str,
        make: Make,
        *,
        prepare: Prepare,
        limits: KeptLimits,
        died: Died,
        note: Callable[[str], None],
        has_watch: bool = False,
    ) -> None:
        """The first actor is made here and prepared by whoever starts the run; `prepare` is what each later one needs before it works.

        `has_watch`: its `watch()` raises when what it keeps is lost.
        """
        self.name = name
        self._make = make
        self._prepare = prepare
        self._limits = limits
        self._history = RestartHistory(name, limits.restarts)
        self._died = died
        self._note = note
        self._has_watch = has_watch
        self._up = asyncio.Event()
        self._suspicion = Suspicion()
        self._changes: list[Callable[[], None]] = []
        self._process: ActorProcess | None = None
        self.handle = make()

    @property
    def is_up(self) -> bool:
        """Whether the actor can be used."""
        return self._up.is_set()

    @property
    def num_restarts(self) -> int:
        """So far."""
        return self._history.num_restarts

    def on_change(self, call: Callable[[], None]) -> None:
        """Have `call` called whenever the actor went down or came up."""
        self._changes.append(call)

    async def ready(self) -> None:
        """Its first actor is prepared."""
        await self._go_up()

    def suspect(self, handle: ray.actor.ActorHandle, why: str) -> None:
        """Whoever asked `handle` found it dead or broken: it is not used any more, and replaced now instead of in a while."""
        if handle is self.handle:
            self._go_down()
            self._suspicion.raise_(why)

    async def until_up(self) -> ray.actor.ActorHandle:
        """The actor, once it can be used. Unblocked by `keep`; the caller brings the limit."""
        await self._up.wait()
        return self.handle

    async def keep(self) -> Never:
        """Start it again whenever it dies; never returns.

        Consumes nothing. Waits for: the actor's death, or silence. Unblocked by: either, `suspect`, or cancelled at the end of the run.

        Raises:
            ProcessDiedError: It died once too often within the window, with the causes.
        """
        while True:
            cause = await self._ended()
            self._go_down()
            while True:
                self._history.ended(cause)
                self._died(self.name, cause)
                try:
                    await self._start_again()
                    break
                except PsrlError as error:
                    cause = f"it did not start again: {error}"
            self._note(f"{self.name} is up again")

    async def answers(self, handle: ray.actor.ActorHandle) -> bool:
        """Whether `handle` lives; one that does not is suspected, so that it is replaced."""
        try:
            await look_of(self.name, ping_of(handle), self._limits.silent_after_s)
        except (ProcessDiedError, DeadlineError) as error:
            self.suspect(handle, str(error))
            return False
        return True

    async def _ended(self) -> str:
        cause = await self._end()
        return f"{cause} ({self._process})" if self._process is not None else cause

    async def _end(self) -> str:
        end = end_of(self.handle, suspicion=self._suspicion, silent_after_s=self._limits.silent_after_s)
        # The watch knows more: a call to a replica whose server has just died fails, too.
        return await (first_done((self._watched_end(), end), grace_s=GRACE_FOR_THE_WATCH_S) if self._has_watch else end)

    async def _watched_end(self) -> str:
        try:
            await look_of(self.name, self.handle.watch.remote(), None)
        except ActorDiedError:
            await asyncio.Event().wait()  # the other look says it better
        except PsrlError as error:
            return str(error)
        raise AssertionError(f"watch() of {self.name} returns only by raising")

    async def _start_again(self) -> None:
        """Make, prepare and offer the next actor."""
        await self._replace()
        await self._go_up()

    async def _replace(self) -> None:
        ray.kill(self.handle, no_restart=True)
        if self._process is not None:
            self._process.kill()  # one that only answers nothing does not hear Ray, and would come back beside its successor
        try:
            self.handle = self._make()
        except (ray.exceptions.RayError, ValueError) as error:
            raise ProcessDiedError(f"Ray makes no actor: {error}") from error
        await answer_of(f"start of {self.name}", self._prepare(self.handle), self._limits.startup_s)

    async def _go_up(self) -> None:
        place = await look_of(self.name, self.handle.__ray_call__.remote(ActorProcess.of), self._limits.startup_s)
        self._process = place
        self._suspicion.drop()  # what was suspected until now was said of its predecessor
        self._up.set()
        self._tell()

    def _go_down(self) -> None:
        if self._up.is_set():
            self._up.clear()
            self._tell()

    def _tell(self) -> None:
        for call in self._changes:
            call()
