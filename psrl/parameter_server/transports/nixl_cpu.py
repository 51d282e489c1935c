"""How a version reaches another node by one-sided reads: NIXL takes the bytes out of the trainer's memory (RDMA where the network has it,
else TCP), `psrl.ps_mode=nixl_cpu`.

Invariant: a read is whole or an error. What was read is checked against the manifest by `shared_memory.publish`, as every version is.
The writer's process takes no part in a read beyond having offered its memory. NIXL is imported only by whoever makes a writer or reader.
"""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from psrl.errors import WeightSyncError
from psrl.types import PolicyVersion

MODULES = ("nixl._api", "nixl_cu12._api", "nixl_cu13._api")
"""The package `nixl` finds one of the others; they work without a GPU too."""
BACKEND = "UCX"
MEMORY = "DRAM"
POLL_S = 0.001


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryOffer:
    """Where a version lies in the memory of a writer, and how its agent is reached."""

    metadata: bytes
    address: int
    size_bytes: int


class NixlWriter:
    """Offers versions that this process has mapped. Each is registered once and stays readable until it is withdrawn."""

    def __init__(self) -> None:
        """WeightSyncError: NIXL is not installed."""
        self._agent, _ = nixl_agent("writer")
        self._offered: dict[PolicyVersion, tuple[np.ndarray, Any]] = {}

    def offer(self, version: PolicyVersion, buffer: np.ndarray) -> MemoryOffer:
        """`buffer` is held until `keep_only` lets go of the version."""
        if version not in self._offered:
            self._offered[version] = (buffer, _registered(self._agent, buffer))
        held = self._offered[version][0]
        return MemoryOffer(metadata=self._agent.get_agent_metadata(), address=held.ctypes.data, size_bytes=held.nbytes)

    def keep_only(self, versions: set[PolicyVersion]) -> None:
        """Withdraw all others."""
        for version in self._offered.keys() - versions:
            self._agent.deregister_memory(self._offered.pop(version)[1])


class NixlReader:
    """Reads what writers offer, one version at a time."""

    def __init__(self) -> None:
        """WeightSyncError: NIXL is not installed."""
        self._agent, self._errors = nixl_agent("reader")

    def read(self, offer: MemoryOffer, *, timeout_s: float) -> np.ndarray:
        """The bytes, in fresh memory.

        Waits for: the network. Unblocked by: the end of the transfer, its failure, or `timeout_s`.

        Raises:
            WeightSyncError: The writer is gone or has withdrawn the version, or it took too long.
        """
        try:
            return self._read(offer, timeout_s)
        except self._errors as error:
            raise WeightSyncError(f"NIXL cannot read a version: {type(error).__name__}: {error}") from error

    def _read(self, offer: MemoryOffer, timeout_s: float) -> np.ndarray:
        target = np.empty(offer.size_bytes, dtype=np.uint8)
        registered = _registered(self._agent, target)
        try:
            writer = self._agent.add_remote_agent(offer.metadata)
            try:
                mine = self._agent.get_xfer_descs([(target.ctypes.data, target.nbytes, 0)], MEMORY)
                theirs = self._agent.get_xfer_descs([(offer.address, offer.size_bytes, 0)], MEMORY)
                handle = self._agent.initialize_xfer("READ", mine, theirs, writer)
                try:
                    _finish(self._agent, handle, timeout_s)
                finally:
                    self._agent.release_xfer_handle(handle)
            finally:
                self._agent.remove_remote_agent(writer)
        finally:
            self._agent.deregister_memory(registered)
        return target


def nixl_agent(role: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """An agent of this process, and what NIXL raises: its errors have no class in common.

    Raises:
        WeightSyncError: NIXL is not installed; with the command that installs it.
    """
    for module in MODULES:
        try:
            api = importlib.import_module(module)
        except ImportError:
            continue
        raised = (kind for kind in vars(api.nixlBind).values() if isinstance(kind, type) and issubclass(kind, Exception))
        name = f"psrl-{role}-{os.uname().nodename}-{os.getpid()}"
        return api.nixl_agent(name, api.nixl_agent_config(backends=[BACKEND])), tuple(raised)
    raise WeightSyncError("psrl.ps_mode=nixl_cpu needs NIXL, which is not installed: pip install nixl, or set psrl.ps_mode=cpu_ref")


def _registered(agent: Any, buffer: np.ndarray) -> Any:
    return agent.register_memory([(buffer.ctypes.data, buffer.nbytes, 0, "")], MEMORY)


def _finish(agent: Any, handle: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    state = agent.transfer(handle)
    while state == "PROC":
        if time.monotonic() > deadline:
            raise WeightSyncError(f"NIXL did not end a read within {timeout_s:g} s")
        time.sleep(POLL_S)
        state = agent.check_xfer_state(handle)
    if state != "DONE":
        raise WeightSyncError(f"NIXL failed to read a version: {state}")
