"""Waiting with an end, also for work that ignores its cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from psrl.errors import DeadlineError, EnvironmentFault

T = TypeVar("T")

GRACE_S = 5.0
"""Cancelled work may take so long to clean up; then it is left behind and named."""


class OutOfTimeError(DeadlineError):
    """A deadline of `within` passed. Its own class, so that it cannot be taken for one that an environment raised."""


class EpisodeOutOfTimeError(OutOfTimeError):
    """The deadline of a whole episode passed; who answers for it is decided by who used the time."""


async def within(
    work: Coroutine[Any, Any, T],
    *,
    timeout_s: float,
    what: str,
    grace_s: float = GRACE_S,
    error_class: type[OutOfTimeError] = OutOfTimeError,
) -> T:
    """Await `work` for `timeout_s` at most; it has ended, or was cancelled and given `grace_s`, when this returns or raises.

    Raises:
        error_class: The deadline passed; the message names `what`.
        EnvironmentFault: The work cancelled itself, which would otherwise look as if psrl had cancelled the episode.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
    except asyncio.CancelledError:
        await _end(task, grace_s)
        raise
    if not done:
        has_ended = await _end(task, grace_s)
        raise error_class(f"{what} took longer than {timeout_s:g} s" + ("" if has_ended else " and ignores its cancellation"))
    if task.cancelled():
        raise EnvironmentFault(f"{what} cancelled itself")
    return task.result()


async def _end(task: asyncio.Future[Any], grace_s: float) -> bool:
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=grace_s)
    if done and not task.cancelled():
        task.exception()  # Retrieved here: what the work raised while it was cancelled is not what ended the episode.
    return bool(done)
