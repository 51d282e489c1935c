"""Agents that block, and agents that call `sys.exit`, in a worker that plays many episodes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import Any

from psrl.errors import AgentError


class AgentThread:
    """A thread of its own for an agent that blocks: it takes no place that others wait for, and the worker's end does not wait for it."""

    def __init__(self, name: str) -> None:
        """Nothing runs before `run`."""
        self._name = name
        self._done: asyncio.Future[Any] | None = None

    async def run(self, work: Callable[[], Any]) -> Any:
        """What `work` returns or raises. A cancellation leaves the thread behind, since no thread can be killed."""
        assert self._done is None, "one thread, one run"
        loop = asyncio.get_running_loop()
        self._done = done = loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def run() -> None:
            result, error = None, None
            try:
                result = work()
            except BaseException as raised:  # noqa: BLE001 whatever an agent raises ends its episode, also sys.exit
                can_be_set = isinstance(raised, Exception) and not isinstance(raised, StopIteration)  # a future takes none of these
                error = raised if can_be_set else AgentError(f"{type(raised).__name__}: {raised}")
            with contextlib.suppress(RuntimeError):  # The worker's loop has ended, and nobody waits any more.
                loop.call_soon_threadsafe(settle, result, error)

        threading.Thread(target=run, name=self._name, daemon=True).start()
        return await asyncio.shield(done)

    async def has_ended(self, timeout_s: float) -> bool:
        """Whether nothing runs any more; waits for it, for `timeout_s` at most."""
        if self._done is None:
            return True
        done, _ = await asyncio.wait({self._done}, timeout=timeout_s)
        if done:
            self._done.exception()  # Retrieved: what it raised after its episode's end says nothing new.
        return bool(done)


async def without_exit(work: Awaitable[Any]) -> Any:
    """`work`, whose `sys.exit` would end the worker, raises an AgentError instead."""
    try:
        return await work
    except SystemExit as error:
        raise AgentError(f"SystemExit: {error}") from error
