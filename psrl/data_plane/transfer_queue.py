"""The data plane on the released TransferQueue: ZMQ storage units and a controller, both Ray actors.

Every call has a deadline, because the library waits without a word when an actor is gone. Calls are coroutines on a loop in a thread
of this object's; the end of the process does not wait for that thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict

from psrl.config.transfer_queue import TransferQueueConfig
from psrl.data_plane.contract import PARTITION, KVBatchMeta, TrajectoryRow
from psrl.data_plane.memory import meta_of
from psrl.errors import DataPlaneError
from psrl.telemetry.flow import Flow

Result = TypeVar("Result")

CLOSE_DEADLINE_S = 20.0
"""The library gives its storage units 15 s to end."""
warnings.filterwarnings("ignore", message="The PyTorch API of nested tensors is in prototype stage")


class TransferQueueDataPlane:
    """`DataPlane` over `transfer_queue`; needs Ray to be connected in this process.

    The first process of a run calls `start`, every other one `connect`.
    """

    def __init__(self, *, deadline_s: float, startup_deadline_s: float) -> None:
        """`deadline_s` bounds each call, `startup_deadline_s` the making of (or attaching to) the actors."""
        self._deadline_s = deadline_s
        self._startup_deadline_s = startup_deadline_s
        self._waiting: set[Future[Any]] = set()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="transfer-queue", daemon=True).start()
        self._owns_storage = False
        self._is_given_up = False
        self.flow = Flow()
        """Rows that were put and fetched."""

    def start(self, settings: TransferQueueConfig, *, node_resource: str | None = None) -> None:
        """Make controller and storage units; the storage where Ray has `node_resource`, if one is named.

        Needs one free logical CPU for each of them.
        """
        conf = OmegaConf.create(
            {
                "backend": {
                    "SimpleStorage": {
                        "num_data_storage_units": settings.num_data_storage_units,
                        "total_storage_size": settings.total_storage_size,
                        "required_node_resource": node_resource,
                    }
                }
            }
        )
        self._owns_storage = True
        self._ended_in_thread("start", lambda: tq.init(conf), self._startup_deadline_s)

    def connect(self) -> None:
        """Attach to the controller that the run's first process made."""
        self._ended_in_thread("connect", tq.init, self._startup_deadline_s)

    def put(self, rows: Sequence[TrajectoryRow]) -> KVBatchMeta:
        """Store rows as ragged columns, in one call."""
        meta = meta_of(rows)
        if not rows:
            return meta
        # Strided: the library only ever takes a column apart, thirty times a put, which of a jagged one is Python in torch.
        fields = TensorDict(
            {name: torch.nested.as_nested_tensor([row.columns[name] for row in rows], layout=torch.strided) for name in rows[0].columns},
            batch_size=len(rows),
        )
        began = time.perf_counter()
        self._ended(f"put of {len(rows)} rows", tq.async_kv_batch_put(meta.keys, PARTITION, fields=fields, tags=meta.tags))
        self.flow.add(sum(column.nbytes for row in rows for column in row.columns.values()), time.perf_counter() - began)
        return meta

    def fetch(self, keys: Sequence[str], columns: Sequence[str]) -> list[dict[str, torch.Tensor]]:
        """Columns of the rows, in the order of `keys`."""
        if not keys:
            return []
        began = time.perf_counter()
        batch = self._ended(
            f"fetch of {len(keys)} rows ({keys[0]}, ...)", tq.async_kv_batch_get(list(keys), PARTITION, select_fields=list(columns))
        )
        absent = [column for column in columns if column not in batch.keys()]  # noqa: SIM118 - a TensorDict is not a dict
        if absent:
            raise DataPlaneError(f"columns {absent} came back from no row; columns.py lists what travels")
        parts = {column: batch[column].unbind() for column in columns}
        self.flow.add(sum(tensor.nbytes for column in parts.values() for tensor in column), time.perf_counter() - began)
        return [{column: parts[column][row] for column in columns} for row in range(len(keys))]

    def keys(self) -> list[str]:
        """Every key."""
        listed = self._ended("list", tq.async_kv_list(PARTITION))
        return list(listed[PARTITION]) if PARTITION in listed else []

    def clear(self, keys: Sequence[str]) -> None:
        """Forget rows."""
        if keys:
            self._ended(f"clear of {len(keys)} rows", tq.async_kv_clear(list(keys), PARTITION))

    def give_up(self) -> None:
        """Calls in flight, and any that come, fail now instead of at their deadlines: perhaps nobody is there to answer them."""
        self._is_given_up = True
        for future in list(self._waiting):
            future.cancel()

    def close(self) -> None:
        """Detach; the process that started the storage ends it."""
        self.give_up()
        if self._owns_storage:
            self._ended_in_thread("close", tq.close, CLOSE_DEADLINE_S, is_last=True)
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _ended(self, what: str, work: Coroutine[Any, Any, Result]) -> Result:
        """What a call of the library gives, from a coroutine on this object's loop, which its deadline or `give_up` cancels."""
        if self._is_given_up:
            work.close()
        return self._answer(what, lambda: asyncio.run_coroutine_threadsafe(work, self._loop), self._deadline_s)

    def _ended_in_thread(self, what: str, call: Callable[[], Result], limit_s: float, *, is_last: bool = False) -> Result:
        """The same of what the library has no coroutine for: in a thread of its own, for which the end of the process does not wait."""

        def begin() -> Future[Result]:
            future: Future[Result] = Future()

            def run() -> None:
                try:
                    result = call()
                except BaseException as error:  # noqa: BLE001
                    _settle(partial(future.set_exception, error))
                else:
                    _settle(partial(future.set_result, result))

            threading.Thread(target=run, name="transfer-queue", daemon=True).start()
            return future

        return self._answer(what, begin, limit_s, is_last=is_last)

    def _answer(self, what: str, begin: Callable[[], Future[Result]], limit_s: float, *, is_last: bool = False) -> Result:
        if self._is_given_up and not is_last:
            raise DataPlaneError(f"TransferQueue: {what} was given up, the run ends")
        future = begin()
        self._waiting.add(future)
        try:
            return future.result(limit_s)
        except FutureTimeoutError as error:
            raise DataPlaneError(f"TransferQueue: {what} did not end within {limit_s:g} s; is its controller alive?") from error
        except CancelledError as error:
            raise DataPlaneError(f"TransferQueue: {what} was given up, the run ends") from error
        except (RuntimeError, ValueError, OSError, KeyError, AssertionError) as error:
            raise DataPlaneError(f"TransferQueue: {what} failed: {type(error).__name__}: {error}") from error
        finally:
            future.cancel()  # Of one that has ended it does nothing.
            self._waiting.discard(future)


def _settle(settle: Callable[[], None]) -> None:
    """Nobody waits any more for a call that was given up."""
    with suppress(InvalidStateError):
        settle()
