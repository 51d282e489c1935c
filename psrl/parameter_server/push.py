"""A model's tensors as one published version."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from psrl.parameter_server.layout import lay_out, pieces_of
from psrl.parameter_server.transports.shared_memory import SharedVersion, publish
from psrl.types import PolicyVersion


def publish_tensors(tensors: Mapping[str, torch.Tensor], version: PolicyVersion) -> SharedVersion:
    """Write the tensors into shared memory of this node, once.

    Raises:
        WeightSyncError: Memory is short.
    """
    manifest = lay_out(tensors.items(), version=version)
    return publish(manifest, pieces_of(tensors.items(), manifest))
