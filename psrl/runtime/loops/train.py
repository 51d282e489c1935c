"""The train loop: a ready buffer becomes an update, and the update becomes served weights."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import ray

from psrl.data_plane import DataPlane, KVBatchMeta, Partition
from psrl.runtime.board import Board, ReadyBuffer
from psrl.runtime.measures import seconds_by_use, step_metrics
from psrl.runtime.supervision import answer_of
from psrl.telemetry import names
from psrl.telemetry.names import TimeUse
from psrl.telemetry.spans import TimeShares
from psrl.types import PolicyVersion


class TrainLoop:
    """One step per ready buffer.

    Consumes: ready buffers of the board.
    Waits for: the buffer of the current version, then the train workers, then the sync.
    Unblocked by: the assemble loop; the workers and replicas themselves, each with a deadline; `stop`, between two steps only.
    """

    def __init__(
        self,
        *,
        board: Board,
        data_plane: DataPlane,
        workers: Sequence[ray.actor.ActorHandle],
        sync: Callable[[PolicyVersion], Awaitable[None]],
        after_step: Callable[[int, dict[str, float]], Awaitable[None]],
        take_group_metrics: Callable[[], dict[str, float]],
        activity: Callable[[str], None],
        step_deadline_s: float,
        stop: asyncio.Event,
    ) -> None:
        """`after_step` validates, saves and shows; it runs before the next version is admitted."""
        self._board = board
        self._data_plane = data_plane
        self._workers = workers
        self._sync = sync
        self._after_step = after_step
        self._take_group_metrics = take_group_metrics
        self._activity = activity
        self._step_deadline_s = step_deadline_s
        self._stop = stop
        self._shares = TimeShares()

    async def run(self, *, first_step: int, last_step: int) -> int:
        """Steps `first_step` to `last_step`, both included; the number of the last one done (less after a stop)."""
        for step in range(first_step, last_step + 1):
            self._shares.take()
            with self._shares.span(TimeUse.GENERATION):
                ready = await self._ready_or_stop()
            if ready is None:
                return step - 1
            self._shares.divide(TimeUse.GENERATION, seconds_by_use(ready.groups))
            metrics = await self._update(step, ready)
            await self._after_step(step, metrics)
            await self._board.advance()
        return last_step

    async def _ready_or_stop(self) -> ReadyBuffer | None:
        ready = asyncio.create_task(self._board.take_ready(), name="ready buffer")
        stopped = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return ready.result() if ready.done() else None
        finally:
            ready.cancel()
            stopped.cancel()

    async def _update(self, step: int, ready: ReadyBuffer) -> dict[str, float]:
        meta = joined_meta(ready)
        self._activity(f"training on {len(meta.keys)} trajectories")
        with self._shares.span(TimeUse.TRAINING):
            updates = [worker.train_step.remote(meta) for worker in self._workers]
            per_rank = await answer_of(f"train step {step}", asyncio.gather(*updates), self._step_deadline_s)
        with self._shares.span(TimeUse.SYNC):
            self._activity("syncing weights")
            await asyncio.gather(
                self._sync(PolicyVersion(ready.consumed.version + 1)), asyncio.to_thread(self._data_plane.clear, meta.keys)
            )
        time = self._shares.take()
        metrics = step_metrics(ready.groups) | self._take_group_metrics() | per_rank[0] | time.metrics()
        metrics[names.STALENESS_VERSION_GAP_MAX] = float(ready.consumed.max_version_gap)
        metrics[names.SYNC_WEIGHTS_SECONDS] = time.seconds * time.shares[TimeUse.SYNC]
        generating_s = time.seconds * sum(time.shares[use] for use in (TimeUse.GENERATION, TimeUse.TOOLS, TimeUse.REWARD))
        metrics[names.GENERATION_TOKENS_PER_SECOND] = metrics[names.GENERATION_TOKENS_COUNT] / max(generating_s, 1e-9)
        return metrics


def joined_meta(ready: ReadyBuffer) -> KVBatchMeta:
    """Keys and tags of all groups of a buffer, in the order of their uids."""
    return KVBatchMeta(
        keys=[key for group in ready.groups for key in group.meta.keys],
        tags=[tag for group in ready.groups for tag in group.meta.tags],
        partition_id=Partition.TRAIN.value,
    )
