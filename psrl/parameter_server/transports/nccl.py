"""How a version reaches another node from card to card, `psrl.ps_mode=nccl`: the trainer's rank 0 and a reader there are a process group
of two, NCCL where they have GPUs, gloo where they have not (which is what tests can run).

Invariant: a read is whole or an error, and a group that failed is never used again. What was read is checked against the manifest by
`shared_memory.publish`, as every version is.

A version goes in chunks over two buffers on the card of each side: while one is on the network, the next is copied. The group is
torch's backend object with a store of its own. It is not the default group, and no group that FSDP made knows of it. It is kept from
version to version, because making one takes seconds.

What the use of NCCL beside FSDP's, from other threads of rank 0 on the same card, relies on:

- A transfer waits for its reader alone, and the reader for the writer alone; FSDP's collectives wait for ranks alone. Either may hold up
  the other on rank 0's card (SMs, a CUDA call that synchronises the device), but nobody waits in a circle, and each of them ends.
- Every transfer has its own stream and communicator, so that what the trainer's stream computes never waits for the network.
- Writer and reader are on different nodes, hence on different GPUs; NCCL refuses two ranks on one.
- `TORCH_NCCL_BLOCKING_WAIT` is set while a group is made, so that torch starts no watchdog for it, which would end the whole process
  where a peer is lost. It is read then and only then, so FSDP's groups, made before the first push, keep theirs.
- NCCL's first connection cannot be timed. Both sides have met in the store just before; for what is left, the caller brings a limit and
  gives the thread up.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from psrl.errors import WeightSyncError
from psrl.types import PolicyVersion

CHUNK_BYTES = 64 * 2**20
NUM_BUFFERS = 2
MEET_TIMEOUT_S = 60.0
"""For both sides to come to the store, and for the group to be made."""
CHUNK_TIMEOUT_S = 30.0
BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
WRITER, READER = 0, 1
"""Ranks of a group."""
LEFT = "the group was left"
MAKING = threading.Lock()
"""Held while the environment of this process is changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupOffer:
    """A version that a writer sends to one reader once both are in their group."""

    version: PolicyVersion
    size_bytes: int
    chunk_bytes: int
    device: str
    """`cuda` or `cpu`, of both sides."""
    host: str
    port: int
    """Of the store where writer and reader meet."""
    reader: str
    session: str
    """Of the reader: with another one a group of its own begins."""


class NcclWriter:
    """Sends versions of this process to readers, each over a group of its own. Any thread may call; one transfer per reader at a time."""

    def __init__(self, *, host: str, device: str, chunk_bytes: int = CHUNK_BYTES, meet_timeout_s: float = MEET_TIMEOUT_S) -> None:
        """`host`: this node's address, by which readers reach it."""
        self._host = host
        self._device = device
        self._chunk_bytes = chunk_bytes
        self._meet_timeout_s = meet_timeout_s
        self._pairs: dict[str, _Pair] = {}
        """By reader; a reader that begins a new session replaces its old one."""
        self._offered: dict[str, tuple[PolicyVersion, np.ndarray]] = {}
        self._lock = threading.Lock()

    def offer(self, version: PolicyVersion, buffer: np.ndarray, *, reader: str, session: str) -> GroupOffer:
        """What `reader` needs to come and get a version; `buffer` is held until it is sent or withdrawn.

        Raises:
            WeightSyncError: No port of this address can be listened at.
        """
        with self._lock:
            pair = self._pairs.get(reader)
            if pair is None or pair.session != session:
                if pair is not None:
                    pair.close()
                pair = self._pairs[reader] = self._hosted(session)
            self._offered[reader] = (version, buffer)
        return GroupOffer(
            version=version,
            size_bytes=buffer.nbytes,
            chunk_bytes=self._chunk_bytes,
            device=self._device,
            host=self._host,
            port=pair.port,
            reader=reader,
            session=session,
        )

    def send(self, offer: GroupOffer, *, timeout_s: float) -> None:
        """Send what was offered.

        Waits for: the reader, then the network. Unblocked by: the end of the transfer, the reader's end, or a deadline: that of the
        meeting, of a chunk, or `timeout_s` for all.

        Raises:
            WeightSyncError: The version was withdrawn, or the transfer failed; the next offer must be to a new session.
        """
        with self._lock:
            pair = self._pairs.get(offer.reader)
            version, buffer = self._offered.pop(offer.reader, (None, None))
        if pair is None or pair.session != offer.session or version != offer.version or buffer is None:
            raise WeightSyncError(f"version {offer.version} is no longer offered to {offer.reader}")
        try:
            pair.join()
            pair.send(buffer, offer.chunk_bytes, time.monotonic() + timeout_s)
        except RuntimeError as error:
            with self._lock:
                if self._pairs.get(offer.reader) is pair:
                    del self._pairs[offer.reader]
            _abandon(pair, error)
            raise WeightSyncError(f"cannot send version {offer.version} to {offer.reader}: {error}") from error

    def keep_only(self, versions: set[PolicyVersion]) -> None:
        """Withdraw all others; what is being sent is sent to its end."""
        with self._lock:
            self._offered = {reader: offered for reader, offered in self._offered.items() if offered[0] in versions}

    def _hosted(self, session: str) -> _Pair:
        try:
            return _Pair.hosted(self._host, session, self._device, self._meet_timeout_s)
        except (OSError, RuntimeError) as error:
            raise WeightSyncError(f"cannot open a store for a reader at {self._host}: {error}") from error


class NcclReader:
    """Receives what a writer offers, one version at a time, in one session: after an error, make another."""

    def __init__(self, *, meet_timeout_s: float = MEET_TIMEOUT_S) -> None:
        self.session = uuid.uuid4().hex
        """To be named to the writer."""
        self._meet_timeout_s = meet_timeout_s
        self._pair: _Pair | None = None

    @property
    def has_group(self) -> bool:
        """Whether the next read goes over a group that is there already; its other side may have ended since."""
        return self._pair is not None

    def read(self, offer: GroupOffer, *, timeout_s: float) -> np.ndarray:
        """The bytes, in fresh memory.

        Waits for: the writer, then the network. Unblocked by: the end of the transfer, the writer's end, or a deadline: that of the
        meeting, of a chunk, or `timeout_s` for all.

        Raises:
            WeightSyncError: The writer is gone or too slow, or it sends from a GPU and there is none here.
        """
        if offer.device == "cuda" and not torch.cuda.is_available():
            raise WeightSyncError("psrl.ps_mode=nccl brings weights from GPU to GPU, and this process sees none: set psrl.ps_mode=cpu_ref")
        until = time.monotonic() + timeout_s
        try:
            if self._pair is None:
                self._pair = _Pair.at(offer, self._meet_timeout_s)
                self._pair.join()
            return self._pair.receive(offer.size_bytes, offer.chunk_bytes, until)
        except RuntimeError as error:
            if self._pair is not None:
                _abandon(self._pair, error)
            raise WeightSyncError(f"cannot read version {offer.version} from {offer.host}: {error}") from error

    def close(self) -> None:
        """Leave the group; may be called twice."""
        if self._pair is not None:
            self._pair.close()


class _Pair:
    """One side of a group of two. Errors are torch's, which are RuntimeErrors."""

    def __init__(self, store: dist.TCPStore, session: str, device: str, rank: int, meet_timeout_s: float) -> None:
        self.session = session
        self._store: dist.TCPStore | None = store
        self.port = store.port
        self._device = device
        self._rank = rank
        self._meet_timeout_s = meet_timeout_s
        self._group: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._buffers: list[torch.Tensor] = []

    @classmethod
    def hosted(cls, host: str, session: str, device: str, meet_timeout_s: float) -> _Pair:
        """The writer's side. Its store listens at this address alone."""
        listening = socket.create_server((host, 0))
        port, timeout = listening.getsockname()[1], timedelta(seconds=meet_timeout_s)
        store = dist.TCPStore(
            host, port, None, is_master=True, timeout=timeout, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        return cls(store, session, device, WRITER, meet_timeout_s)

    @classmethod
    def at(cls, offer: GroupOffer, meet_timeout_s: float) -> _Pair:
        """The reader's side, of an offer."""
        timeout = timedelta(seconds=meet_timeout_s)
        store = dist.TCPStore(offer.host, offer.port, None, is_master=False, timeout=timeout, wait_for_workers=False)
        return cls(store, offer.session, offer.device, READER, meet_timeout_s)

    def join(self) -> None:
        """Be in the group; at once where this side is already."""
        if self._group is not None:
            return
        store = self._store
        if store is None:
            raise RuntimeError(LEFT)
        timeout, names = timedelta(seconds=self._meet_timeout_s), ("writer", "reader")
        store.set(names[self._rank], "here")
        store.wait([names[1 - self._rank]], timeout)
        self._group = _backend(store, self._rank, self._device, timeout)

    def send(self, buffer: np.ndarray, chunk_bytes: int, until: float) -> None:
        """All bytes, in order."""
        whole, under_way, group = torch.from_numpy(buffer), deque[Any](), self._joined
        with self._on_own_stream():
            for index, chunk in self._chunks(buffer.nbytes, chunk_bytes):
                if len(under_way) == NUM_BUFFERS:
                    _finish(under_way.popleft(), until)
                start = index * chunk_bytes
                chunk.copy_(whole[start : start + chunk.numel()])
                under_way.append(group.send([chunk], READER, index % NUM_BUFFERS))
            for work in under_way:
                _finish(work, until)

    def receive(self, size_bytes: int, chunk_bytes: int, until: float) -> np.ndarray:
        """As many bytes as the writer sends."""
        target = np.empty(size_bytes, dtype=np.uint8)
        whole, under_way = torch.from_numpy(target), deque[tuple[int, torch.Tensor, Any]]()
        group = self._joined

        def finish_oldest() -> None:
            start, chunk, work = under_way.popleft()
            _finish(work, until)
            whole[start : start + chunk.numel()].copy_(chunk)

        with self._on_own_stream():
            for index, chunk in self._chunks(size_bytes, chunk_bytes):
                if len(under_way) == NUM_BUFFERS:
                    finish_oldest()
                under_way.append((index * chunk_bytes, chunk, group.recv([chunk], WRITER, index % NUM_BUFFERS)))
            while under_way:
                finish_oldest()
        return target

    def close(self) -> None:
        """Leave; a thread that waits in the group gets an error, with gloo only at the deadline of its chunk."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            with suppress(RuntimeError):  # NCCL's did not end in time; the group is not used again in any case
                group.abort()

    @property
    def _joined(self) -> Any:
        if self._group is None:
            raise RuntimeError(LEFT)
        return self._group

    def _chunks(self, size_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Of each chunk its number and the part of a buffer that it has."""
        longest = min(chunk_bytes, size_bytes)
        if not self._buffers or self._buffers[0].numel() < longest:
            self._buffers = [torch.empty(longest, dtype=torch.uint8, device=self._device) for _ in range(NUM_BUFFERS)]
        for index, start in enumerate(range(0, size_bytes, chunk_bytes)):
            yield index, self._buffers[index % NUM_BUFFERS][: min(chunk_bytes, size_bytes - start)]

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        if self._device == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream()
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            yield


def _backend(store: dist.TCPStore, rank: int, device: str, timeout: timedelta) -> Any:
    if device == "cpu":
        return dist.ProcessGroupGloo(store, rank, 2, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    with MAKING:
        # Where it is in the environment already it changes in place, which other threads may read meanwhile.
        before = os.environ.setdefault(BLOCKING_WAIT, "0")
        os.environ[BLOCKING_WAIT] = "1"
        try:
            return dist.ProcessGroupNCCL(store, rank, 2, options)
        finally:
            os.environ[BLOCKING_WAIT] = before


def _abandon(pair: _Pair, error: RuntimeError) -> None:
    """After an error: nothing of it must keep the connection open, on whose end the other side waits."""
    traceback.clear_frames(error.__traceback__)
    pair.close()


def _finish(work: Any, until: float) -> None:
    left_s = min(CHUNK_TIMEOUT_S, until - time.monotonic())
    if left_s <= 0 or not work.wait(timedelta(seconds=left_s)):
        raise RuntimeError("it did not end in time")
