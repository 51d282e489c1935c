"""The train loop: a ready buffer becomes an update, and the update becomes weights that replicas can take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import ray

from psrl.data_plane import PARTITION, DataPlane, KVBatchMeta
from psrl.runtime.board import Board, ReadyBuffer
from psrl.runtime.measures import seconds_by_use, staleness_metrics, step_metrics
from psrl.runtime.supervision import answer_of
from psrl.telemetry import names
from psrl.telemetry.names import TimeUse
from psrl.telemetry.spans import TimeShares
from psrl.types import PolicyVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMeters:
    """Of the loops beside the train loop: what they counted since they were last asked."""

    take_metrics: Sequence[Callable[[], dict[str, float]]]
    take_standing_s: Callable[[], float]
    """Seconds in which no replica could generate, because all of them took weights."""


class TrainLoop:
    """One step per ready buffer.

    Consumes: ready buffers of the board.
    Waits for: the buffer of the current version, then the train workers, then the push of the weights.
    Unblocked by: the assemble loop; the workers themselves, each with a deadline; `stop`, between two steps only.
    """

    def __init__(
        self,
        *,
        board: Board,
        data_plane: DataPlane,
        workers: Sequence[ray.actor.ActorHandle],
        push: Callable[[PolicyVersion], Awaitable[None]],
        after_step: Callable[[int, ReadyBuffer, dict[str, float]], Awaitable[None]],
        shares: TimeShares,
        meters: StepMeters,
        activity: Callable[[str], None],
        step_deadline_s: float,
        stop: asyncio.Event,
    ) -> None:
        """`after_step` shows, validates and saves, and books its waits in `shares`; replicas take the new weights meanwhile."""
        self._board = board
        self._data_plane = data_plane
        self._workers = workers
        self._push = push
        self._after_step = after_step
        self._meters = meters
        self._activity = activity
        self._step_deadline_s = step_deadline_s
        self._stop = stop
        self._shares = shares

    async def run(self, *, first_step: int, last_step: int) -> int:
        """Steps `first_step` to `last_step`, both included; the number of the last one done (less after a stop)."""
        self._shares.take()
        for step in range(first_step, last_step + 1):
            ready = await self._waited_for(step)
            if ready is None:
                return step - 1
            metrics = await self._update(step, ready)
            await self._after_step(step, ready, metrics)
        return last_step

    async def _waited_for(self, step: int) -> ReadyBuffer | None:
        """The ready buffer; the wait is booked by what its episodes waited for, and what all replicas stood still for."""
        self._activity(f"step {step}: waiting for groups")
        self._meters.take_standing_s()
        began = time.monotonic()
        with self._shares.span(TimeUse.GENERATION):
            ready = await self._ready_or_stop()
        if ready is not None:
            waited_s, standing_s = time.monotonic() - began, self._meters.take_standing_s()
            self._shares.divide(TimeUse.GENERATION, uses_of_wait(waited_s, standing_s, seconds_by_use(ready.groups)))
        return ready

    async def _ready_or_stop(self) -> ReadyBuffer | None:
        if self._stop.is_set():
            return None  # also where the next buffer is ready, as it nearly always is with staleness
        ready = asyncio.create_task(self._board.take_ready(), name="ready buffer")
        stopped = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return ready.result() if ready.done() else None
        finally:
            ready.cancel()
            stopped.cancel()

    async def _update(self, step: int, ready: ReadyBuffer) -> dict[str, float]:
        meta, version = joined_meta(ready), ready.consumed.version
        self._activity(f"step {step}: training on {len(meta.keys)} trajectories")
        with self._shares.span(TimeUse.TRAINING):
            updates = [worker.train_step.remote(meta, version=version) for worker in self._workers]
            per_rank = await answer_of(f"train step {step}", asyncio.gather(*updates), self._step_deadline_s)
        began = time.monotonic()
        with self._shares.span(TimeUse.SYNC):
            self._activity(f"step {step}: publishing weights")
            await asyncio.gather(self._push(PolicyVersion(version + 1)), asyncio.to_thread(self._data_plane.clear, meta.keys))
        push_s = time.monotonic() - began
        self._board.published(self._board.advance())
        step_time = self._shares.take()
        metrics = step_metrics(ready.groups) | staleness_metrics(ready, self._board) | per_rank[0] | step_time.metrics()
        for take in self._meters.take_metrics:
            metrics |= take()
        metrics[names.SYNC_PUSH_SECONDS] = push_s
        metrics[names.GENERATION_TOKENS_PER_SECOND] = metrics[names.GENERATION_TOKENS_COUNT] / max(step_time.seconds, 1e-9)
        return metrics


def uses_of_wait(waited_s: float, standing_s: float, seconds: dict[TimeUse, float]) -> dict[TimeUse, float]:
    """Weights that divide a wait: the time in which every replica took weights, then what the episodes spent their time on.

    Example:
        10 s of waiting, 2 s of them standing, episodes that generated 3 times as long as they used tools:
        sync 2, generation 6, tools 2.
    """
    standing_s = min(standing_s, waited_s)
    total = sum(seconds.values())
    parts = {use: (waited_s - standing_s) * value / total for use, value in seconds.items()} if total > 0 else {}
    return {**parts, TimeUse.SYNC: standing_s} if parts else {TimeUse.GENERATION: waited_s - standing_s, TimeUse.SYNC: standing_s}


def joined_meta(ready: ReadyBuffer) -> KVBatchMeta:
    """Keys and tags of all groups of a buffer, in the order of their uids."""
    return KVBatchMeta(
        keys=[key for group in ready.groups for key in group.meta.keys],
        tags=[tag for group in ready.groups for tag in group.meta.tags],
        partition_id=PARTITION,
    )
