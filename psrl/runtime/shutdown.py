"""The end of a run: signals become a request to stop, and every process is ended whatever happened."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import FrameType

from psrl.errors import PsrlError
from psrl.runtime.build import Cluster
from psrl.runtime.supervision import answer_of


class StopRequest:
    """Turns the first SIGINT or SIGTERM into an event, and a second one into KeyboardInterrupt."""

    def __init__(self, *, note: Callable[[str], None]) -> None:
        self.event = asyncio.Event()
        self._note = note
        self._loop = asyncio.get_running_loop()
        self._previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def install(self) -> None:
        """Listen from now on; `restore` must follow."""
        for number in self._previous:
            signal.signal(number, self._on_signal)

    def restore(self) -> None:
        """Give the signals back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.event.is_set():
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        self._loop.call_soon_threadsafe(self._request, name)

    def _request(self, name: str) -> None:
        self._note(f"{name}: finishing what can't be interrupted, saving, stopping (again to stop at once)")
        self.event.set()


async def stop_cluster(cluster: Cluster, *, deadline_s: float) -> list[str]:
    """End every process: politely within the deadline; the end of Ray ends the rest. Returns what did not end politely."""
    stops = {
        **{worker.name: worker.handle.stop.remote() for worker in cluster.workers.workers},
        **{replica.name: replica.handle.stop.remote() for replica in cluster.fleet.all_replicas},
        **({"gateway": cluster.gateway.handle.stop.remote()} if cluster.gateway is not None else {}),
        "TransferQueue": asyncio.to_thread(cluster.data_plane.close),
    }
    results = await asyncio.gather(
        *(answer_of(f"stop of {name}", stop, deadline_s) for name, stop in stops.items()), return_exceptions=True
    )
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, PsrlError):
            raise result
    return [str(result) for result in results if isinstance(result, PsrlError)]
