"""What crosses the network between the nodes of a run: weights, rows and turns, each in bytes and seconds.

Every process counts what it sends and gets; whether that crosses nodes is known here, where it is known what lies where. The gradients
and weights that ranks exchange are not among it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from psrl.config.placement import Role
from psrl.errors import PsrlError
from psrl.runtime.build import Cluster
from psrl.runtime.groups import WorkerFlows
from psrl.runtime.supervision import look_of
from psrl.telemetry import names
from psrl.telemetry.flow import Flow

Result = TypeVar("Result")
DEADLINE_S = 10.0
"""Of one answer; a process that does not give it now gives it with the next step."""


class TrafficMeter:
    """Of one run."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._places = cluster.places

    async def take(self) -> dict[str, float]:
        """Metrics of what crossed nodes since the last call; empty while the run has one node.

        Waits for: an answer of every agent worker and rank. Unblocked by: these, or a deadline each.
        """
        if not self._places.spans_nodes:
            return {}
        weights = self._cluster.fleet.take_brought()
        of_workers, of_ranks = await asyncio.gather(
            asyncio.gather(*(_answer(worker.handle.take_flows.remote()) for worker in self._cluster.workers.workers)),
            asyncio.gather(*(_answer(worker.take_flow.remote()) for worker in self._cluster.train_workers)),
        )
        rows, turns = Flow(), Flow()
        for rank, flow in enumerate(of_ranks):
            if flow is not None and self._places.address(Role.TRAIN_WORKER, rank) != self._places.anchor:
                rows.join(flow)
        for index, flows in enumerate(of_workers):
            if flows is not None:
                self._add_worker(self._places.address(Role.AGENT_WORKER, index), flows, rows, turns)
        return {
            names.NETWORK_WEIGHTS_BYTES: float(weights.num_bytes),
            names.NETWORK_WEIGHTS_SECONDS: weights.seconds,
            names.NETWORK_ROWS_BYTES: float(rows.num_bytes),
            names.NETWORK_ROWS_SECONDS: rows.seconds,
            names.NETWORK_TURNS_BYTES: float(turns.num_bytes),
            names.NETWORK_TURNS_SECONDS: turns.seconds,
        }

    def _add_worker(self, address: str, flows: WorkerFlows, rows: Flow, turns: Flow) -> None:
        if address != self._places.anchor:
            rows.join(flows.rows)
        for url, flow in flows.turns.items():
            if not url.startswith(f"http://{address}:"):
                turns.join(flow)


async def _answer(call: Awaitable[Result]) -> Result | None:
    try:
        return await look_of("traffic", call, DEADLINE_S)
    except PsrlError:
        return None
