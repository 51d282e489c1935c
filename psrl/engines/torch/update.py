"""Staging: a new version is found, checked whole and made ready to serve, beside the one that is served."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from psrl.engines.torch.adapter import is_adapter, with_adapter
from psrl.engines.torch.weights import Weights, num_parameters
from psrl.errors import EngineError, WeightSyncError
from psrl.parameter_server.checksum import checksum
from psrl.parameter_server.layout import read_tensors
from psrl.parameter_server.transports.shared_memory import open_version
from psrl.protocols import WeightManifest, WeightReport
from psrl.types import PolicyVersion

CHECKSUM_OF_START = "start"
"""Reported until the first update: the starting weights came from a folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Version:
    """Weights that can be served."""

    weights: Weights
    report: WeightReport


Post = Callable[..., None]
"""`post(command, refused=...)`: have the engine's thread run `command` between two steps, or run `refused` when it has ended."""


class WeightUpdate:
    """The served version and at most one staged one. Belongs to the engine's thread, which is held up by neither of its methods."""

    def __init__(self, weights: Weights) -> None:
        """`weights` are version 0."""
        count = num_parameters(weights.shape)
        report = WeightReport(version=PolicyVersion(0), num_matched=count, num_expected=count, checksum=CHECKSUM_OF_START)
        self._start = weights
        self.served = Version(weights=weights, report=report)
        self._staged: Version | None = None
        self._one_at_a_time = threading.Lock()

    def stage(self, manifest: WeightManifest, done: Future[WeightReport], post: Post) -> None:
        """Begin to make a version ready in a thread of its own; `done` ends with its report, EngineError or WeightSyncError."""
        self._staged = None

        def make_ready() -> None:
            torch.set_num_threads(1)  # the setting belongs to the calling thread; decoding goes on beside it
            try:
                with self._one_at_a_time, torch.inference_mode():
                    version = checked(manifest, self._start)
            except WeightSyncError as error:
                return done.set_exception(error)
            except (RuntimeError, ValueError) as error:  # torch's, such as memory that runs out
                return done.set_exception(EngineError(f"{type(error).__name__}: {error}"))
            return post(lambda: self._accept(version, done), refused=lambda: done.set_exception(EngineError("engine is closed")))

        threading.Thread(target=make_ready, name="weight-staging", daemon=True).start()

    def commit(self, version: PolicyVersion, use: Callable[[Weights], None]) -> WeightReport:
        """Serve the staged version; `use` makes the forward pass take its weights and let go of the old ones.

        Raises:
            WeightSyncError: Another version is staged, or none.
        """
        if self._staged is None or self._staged.report.version != version:
            staged = None if self._staged is None else self._staged.report.version
            raise WeightSyncError(f"version {version} cannot be finished: staged is {staged}")
        retired = [self.served]
        self.served, self._staged = self._staged, None
        use(self.served.weights)
        threading.Thread(target=retired.clear, name="weight-retirement", daemon=True).start()  # giving memory back takes time
        return self.served.report

    def _accept(self, version: Version, done: Future[WeightReport]) -> None:
        self._staged = version
        done.set_result(version.report)


def checked(manifest: WeightManifest, start: Weights) -> Version:
    """Map a version and check it. On the CPU, in the same dtype, the weights stay where they lie: nothing is copied.

    `start` says the architecture, dtype and device, and is what an adapter is merged into.

    Raises:
        WeightSyncError: The version is gone or cut, the checksum differs, or tensors do not fit.
    """
    buffer = open_version(manifest)
    found = checksum(buffer)
    if found != manifest.checksum:
        raise WeightSyncError(f"version {manifest.version} has checksum {found}, its manifest says {manifest.checksum}")
    tensors = read_tensors(buffer, manifest)
    if is_adapter(tensors):
        weights, count = with_adapter(start, tensors), len(tensors)
    else:
        weights = Weights.of(start.shape, tensors, dtype=start.embedding.dtype, device=start.embedding.device)
        count = num_parameters(start.shape)
    return Version(weights=weights, report=WeightReport(version=manifest.version, num_matched=count, num_expected=count, checksum=found))
