"""Weight sync: push from the train workers, pull by every replica, and proof that they arrived."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import ray

from psrl.errors import WeightSyncError
from psrl.protocols import WeightManifest, WeightReport
from psrl.runtime.supervision import answer_of
from psrl.types import PolicyVersion


async def sync_weights(
    *,
    train_workers: Sequence[ray.actor.ActorHandle],
    parameter_server: ray.actor.ActorHandle,
    replicas: Sequence[ray.actor.ActorHandle],
    version: PolicyVersion,
    deadline_s: float,
) -> None:
    """Bring `version` from the trainer to all replicas.

    Consumes: the trainer's weights.
    Waits for: the gather on all ranks, then every replica's report.
    Unblocked by: the ranks and replicas themselves, or the deadline.

    Raises:
        WeightSyncError: A replica reports another version, fewer tensors or another checksum; the run must stop.
    """
    pushes = [worker.push.remote(parameter_server, version) for worker in train_workers]
    manifests = await answer_of(f"push of weights {version}", asyncio.gather(*pushes), deadline_s)
    manifest = manifests[0]
    pulls = [replica.sync.remote(parameter_server, version) for replica in replicas]
    reports = await answer_of(f"pull of weights {version}", asyncio.gather(*pulls), deadline_s)
    for index, report in enumerate(reports):
        check_report(f"replica {index}", manifest, report)


def check_report(who: str, manifest: WeightManifest, report: WeightReport) -> None:
    """Version, number of tensors and checksum must be those that were pushed.

    Raises:
        WeightSyncError: They are not.
    """
    expected = (manifest.version, len(manifest.tensors), len(manifest.tensors), manifest.checksum)
    found = (report.version, report.num_matched, report.num_expected, report.checksum)
    if expected != found:
        raise WeightSyncError(
            f"{who} has version {report.version}, {report.num_matched} of {report.num_expected} tensors, checksum {report.checksum}; "
            f"pushed was version {manifest.version}, {len(manifest.tensors)} tensors, checksum {manifest.checksum}"
        )
