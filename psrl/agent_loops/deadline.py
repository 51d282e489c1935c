"""Waiting with an end, also for work that ignores its cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from psrl.errors import DeadlineError, EnvironmentFault
from psrl.types import EpisodeUid

T = TypeVar("T")

GRACE_S = 5.0
"""Cancelled work may take so long to clean up; then it is left behind and named."""


class OutOfTimeError(DeadlineError):
    """A deadline of `within` passed. Its own class, so that it cannot be taken for one that an environment raised."""


class EpisodeOutOfTimeError(OutOfTimeError):
    """The deadline of a whole episode passed; who answers for it is decided by who used the time."""


class TruncatedError(OutOfTimeError):
    """psrl ended an episode early: it is judged by what it has until then."""


class Truncations:
    """Which of the episodes in flight are to end now with what they have. One object for all episodes of a worker's pool."""

    def __init__(self) -> None:
        self._orders: dict[EpisodeUid, asyncio.Event] = {}

    def of(self, uid: EpisodeUid) -> asyncio.Event:
        """Set as soon as the episode is to end."""
        return self._orders.setdefault(uid, asyncio.Event())

    def forget(self, uid: EpisodeUid) -> None:
        """The episode has ended."""
        self._orders.pop(uid, None)


async def within(
    work: Coroutine[Any, Any, T],
    *,
    timeout_s: float,
    what: str,
    grace_s: float = GRACE_S,
    error_class: type[OutOfTimeError] = OutOfTimeError,
    truncation: asyncio.Event | None = None,
) -> T:
    """Await `work` for `timeout_s` at most; it has ended, or was cancelled and given `grace_s`, when this returns or raises.

    Waits for: the work. Unblocked by: its end, the deadline, `truncation`, or being cancelled.

    Raises:
        error_class: The deadline passed; the message names `what`.
        TruncatedError: `truncation` was set.
        EnvironmentFault: The work cancelled itself, which would otherwise look as if psrl had cancelled the episode.
    """
    task = asyncio.ensure_future(work)
    order = None if truncation is None else asyncio.ensure_future(truncation.wait())
    try:
        await asyncio.wait({task} if order is None else {task, order}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        await _end(task, grace_s)
        raise
    finally:
        if order is not None:
            order.cancel()
    if not task.done():
        has_ended = await _end(task, grace_s)
        left = "" if has_ended else " and ignores its cancellation"
        if truncation is not None and truncation.is_set():
            raise TruncatedError(f"{what} was ended early{left}")
        raise error_class(f"{what} took longer than {timeout_s:g} s{left}")
    if task.cancelled():
        raise EnvironmentFault(f"{what} cancelled itself")
    return task.result()


async def _end(task: asyncio.Future[Any], grace_s: float) -> bool:
    task.cancel()
    done, _ = await asyncio.wait({task}, timeout=grace_s)
    if done and not task.cancelled():
        task.exception()  # Retrieved here: what the work raised while it was cancelled is not what ended the episode.
    return bool(done)
