"""Where the turns of a run go, and who must know when an engine is started again on another node."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from psrl.errors import ActorDiedError, DeadlineError
from psrl.runtime.groups import Endpoints
from psrl.runtime.kept_actor import KeptActor
from psrl.runtime.supervision import answer_of

TOLD_WITHIN_S = 30.0
OnMove = Callable[[str, str], Awaitable[None]]
"""Is told the old and the new URL of an engine that was started again on another node."""


class Addresses:
    """Where agent workers send turns, from when it is known. What is started again keeps its address, unless its node is lost."""

    def __init__(self) -> None:
        self._endpoints: Endpoints | None = None
        self.on_move: list[OnMove] = []
        """Who must know of engines that have another URL."""

    def set(self, endpoints: Endpoints) -> None:
        """Engines and gateway are up."""
        self._endpoints = endpoints

    def get(self) -> Endpoints:
        """For a worker that connects."""
        assert self._endpoints is not None, "engines and gateway come first"
        return self._endpoints

    async def move(self, old: str, new: str) -> None:
        """An engine has another URL; returns when everybody knows."""
        known = self.get()
        urls, of_validation = ([new if url == old else url for url in each] for each in (known.generate_urls, known.validation_urls))
        self._endpoints = replace(known, generate_urls=urls, validation_urls=of_validation)
        await asyncio.gather(*(tell(old, new) for tell in self.on_move))


async def told(what: str, calls: Mapping[str, Awaitable[None]]) -> None:
    """Wait for those who were told something. Whoever does not hear it is the supervisor's to replace, and learns it then."""

    async def tell(name: str, call: Awaitable[None]) -> None:
        with suppress(ActorDiedError, DeadlineError):
            await answer_of(f"{what} to {name}", call, TOLD_WITHIN_S)

    await asyncio.gather(*(tell(name, call) for name, call in calls.items()))


def tell_all(actors: Sequence[KeptActor]) -> OnMove:
    """Have agent workers, or the gateway, send turns to where an engine is now."""

    def tell(old: str, new: str) -> Awaitable[None]:
        return told("new address of an engine", {actor.name: actor.handle.readdress.remote(old, new) for actor in actors})

    return tell
