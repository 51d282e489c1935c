"""Taking over a new version of the weights: first checked whole, then copied between two steps."""

from __future__ import annotations

import torch

from psrl.engines.torch.weights import Weights
from psrl.errors import WeightSyncError
from psrl.parameter_server.layout import checksum, read_tensors
from psrl.parameter_server.transports.shared_memory import open_version
from psrl.protocols import WeightManifest, WeightReport
from psrl.types import PolicyVersion

CHECKSUM_OF_START = "start"
"""Reported until the first update: the starting weights came from a folder."""


class WeightUpdate:
    """The served version and at most one staged one, which is mapped and not copied."""

    def __init__(self, weights: Weights) -> None:
        """`weights` hold version 0."""
        count = len(weights.named)
        self._weights = weights
        self.report = WeightReport(version=PolicyVersion(0), num_matched=count, num_expected=count, checksum=CHECKSUM_OF_START)
        self._staged: tuple[dict[str, torch.Tensor], WeightReport] | None = None

    def stage(self, manifest: WeightManifest) -> WeightReport:
        """Map a version and check it; what is served stays as it is.

        Raises:
            WeightSyncError: The file is gone or cut, the checksum differs, or tensors do not fit.
        """
        self._staged = None
        buffer = open_version(manifest)
        found = checksum(buffer)
        if found != manifest.checksum:
            raise WeightSyncError(f"version {manifest.version} has checksum {found}, its manifest says {manifest.checksum}")
        tensors = read_tensors(buffer, manifest)
        num_matched = self._weights.check(tensors)
        num_expected = len(self._weights.named)
        report = WeightReport(version=manifest.version, num_matched=num_matched, num_expected=num_expected, checksum=found)
        self._staged = (tensors, report)
        return report

    def commit(self, version: PolicyVersion) -> WeightReport:
        """Serve the staged version.

        Raises:
            WeightSyncError: Another version is staged, or none.
        """
        if self._staged is None or self._staged[1].version != version:
            staged = None if self._staged is None else self._staged[1].version
            raise WeightSyncError(f"version {version} cannot be finished: staged is {staged}")
        tensors, report = self._staged
        self._staged = None
        self._weights.copy_from(tensors)
        self.report = report
        return report
