"""Threads that wait for an Engine, and for which the end of the process does not wait.

The standard pool's threads are joined when the interpreter exits: a pull that hangs would hold a run that is over for half an hour.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

Answer = TypeVar("Answer")


class EngineThreads:
    """At most `num_threads` calls at once, in the order in which they came; threads are started when needed and kept."""

    def __init__(self, num_threads: int, *, name: str) -> None:
        """No thread is started yet."""
        self._num_threads = num_threads
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._num_started = 0

    def submit(self, call: Callable[[], Answer]) -> Future[Answer]:
        """What `call` will have returned or raised; one that is cancelled before its turn is not made. From one thread."""
        future: Future[Answer] = Future()
        self._calls.put((future, call))
        if not self._idle.acquire(blocking=False) and self._num_started < self._num_threads:
            self._num_started += 1
            threading.Thread(target=self._serve, name=f"{self._name}-{self._num_started}", daemon=True).start()
        return future

    def _serve(self) -> None:
        """Consumes calls, for as long as the process lives; waits for the next one; unblocked by `submit`."""
        while True:
            future, call = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # noqa: BLE001
                    future.set_exception(error)
            del future, call  # an idle thread keeps nothing alive
            self._idle.release()
