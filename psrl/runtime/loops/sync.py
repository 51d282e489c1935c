"""The sync loop: replicas take newer weights, each when the coordinator says so, while the others go on."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable

from psrl.config.asynchrony import PartialRolloutConfig
from psrl.errors import EngineError, ProcessDiedError, PsrlError
from psrl.runtime.board import Board
from psrl.runtime.fleet import Fleet
from psrl.staleness import SyncOrder
from psrl.telemetry import names

RETRY_PAUSE_S = 1.0
"""Of an instance after a sync that failed."""
MAX_FAILURES = 10
"""Of one instance in a row; then the run stops with the last cause. An instance whose replicas die ends by their restarts sooner."""


class SyncLoop:
    """Carries out sync orders.

    Consumes: sync orders of the board.
    Waits for: the next order; each sync, within its deadline.
    Unblocked by: the train loop (a published version), groups that end, the loads that the tend loop observes.
    """

    def __init__(
        self,
        *,
        board: Board,
        fleet: Fleet,
        partial_rollout: PartialRolloutConfig,
        activity: Callable[[str], None],
        failed: Callable[[int, PsrlError], None],
        retry_pause_s: float = RETRY_PAUSE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`failed` is told the instance and why it took no weights."""
        self._board = board
        self._fleet = fleet
        self._mode = pause_mode(partial_rollout)
        self._activity = activity
        self._failed = failed
        self._retry_pause_s = retry_pause_s
        self._clock = clock
        self._syncing: set[int] = set()
        self._resting: set[int] = set()
        self._num_failures: Counter[int] = Counter()
        self._stood_since: float | None = None
        self._stood_s = 0.0
        self._seconds: list[float] = []
        self._paused: list[float] = []

    async def run(self) -> None:
        """Until cancelled.

        Raises:
            WeightSyncError: A replica did not end up with the weights that were pushed; the run stops.
            PsrlError: What an instance failed with `MAX_FAILURES` times in a row.
        """
        async with asyncio.TaskGroup() as syncs:
            while True:
                orders = [order for order in await self._board.next_syncs() if order.instance not in self._resting]
                if not orders:
                    await asyncio.sleep(self._retry_pause_s / 10)
                for order in orders:
                    self._board.sync_began(order.instance)
                    self._count(order.instance, is_syncing=True)
                    syncs.create_task(self._sync(order), name=f"sync of instance {order.instance} to {order.version}")

    def take_standing_s(self) -> float:
        """Seconds since the last call in which every instance was taking weights, so that none of them could generate."""
        now = self._clock()
        if self._stood_since is not None:
            self._stood_s += now - self._stood_since
            self._stood_since = now
        standing_s, self._stood_s = self._stood_s, 0.0
        return standing_s

    def take_metrics(self) -> dict[str, float]:
        """Of the syncs since the last call."""
        metrics = {names.SYNC_PULLS_COUNT: float(len(self._seconds))}
        if self._seconds:
            metrics[names.SYNC_PULL_SECONDS_MEAN] = sum(self._seconds) / len(self._seconds)
            metrics[names.SYNC_PAUSED_SECONDS_MAX] = max(self._paused)
            metrics[names.SYNC_PAUSED_SECONDS_MEAN] = sum(self._paused) / len(self._paused)
        self._seconds, self._paused = [], []
        return metrics

    async def _sync(self, order: SyncOrder) -> None:
        self._activity(f"instance {order.instance} takes weights {order.version}")
        try:
            result = await self._fleet.sync(order.instance, order.version, self._mode)
        except (EngineError, ProcessDiedError) as error:
            # The fleet sees to a replica that died, and says when it is back. One that lives is asked again, but not at once.
            self._board.sync_failed(order.instance)
            self._failed(order.instance, error)
            self._num_failures[order.instance] += 1
            if self._num_failures[order.instance] == MAX_FAILURES:
                raise
            self._resting.add(order.instance)
            asyncio.get_running_loop().call_later(self._retry_pause_s, self._resting.discard, order.instance)
        else:
            self._num_failures[order.instance] = 0
            self._seconds.append(result.seconds)
            self._paused.append(result.paused_s)
            self._board.synced(order.instance, result.report.version)
        finally:
            self._count(order.instance, is_syncing=False)

    def _count(self, instance: int, *, is_syncing: bool) -> None:
        (self._syncing.add if is_syncing else self._syncing.discard)(instance)
        now, stands = self._clock(), len(self._syncing) == self._fleet.num_instances
        if stands and self._stood_since is None:
            self._stood_since = now
        elif not stands and self._stood_since is not None:
            self._stood_s, self._stood_since = self._stood_s + now - self._stood_since, None


def pause_mode(partial_rollout: PartialRolloutConfig) -> str:
    """How a replica is paused for newer weights: `wait`, `abort` or `keep`."""
    if not partial_rollout.enable:
        return "wait"
    return "abort" if partial_rollout.interrupt_as_prompt else "keep"
