"""Arrived groups of a run in the middle of a step: their rows go from one TransferQueue over the disk into the next one."""

import asyncio
from contextlib import contextmanager

import pytest
import ray

from psrl.config.transfer_queue import TransferQueueConfig
from psrl.data_plane import COLUMN_NAMES, TrajectoryRow
from psrl.data_plane.transfer_queue import TransferQueueDataPlane
from psrl.runtime.recovery import newest_whole_checkpoint, restore_rows
from tests.runtime.resume_builders import a_plane, a_point, a_run, row, save


@contextmanager
def a_transfer_queue():
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    plane = TransferQueueDataPlane(deadline_s=60.0, startup_deadline_s=120.0)
    try:
        plane.start(TransferQueueConfig())
        yield plane
    finally:
        plane.close()
        ray.shutdown()


def values(plane, keys):
    return [{name: (column.dtype, column.tolist()) for name, column in each.items()} for each in plane.fetch(keys, COLUMN_NAMES)]


@pytest.mark.slow
def test_rows_outlive_the_transfer_queue_that_held_them(tmp_path):
    folder, point = a_run(tmp_path), a_point()
    keys = [key for result in point.arrived for key in result.meta.keys]
    expected = a_plane(*point.arrived)
    metas = [result.meta for result in point.arrived]
    with a_transfer_queue() as plane:
        plane.put([row("of-a-group-in-flight", 5, version=3)])
        for meta in metas:  # as agent workers do: one call per group
            columns = expected.fetch(meta.keys, COLUMN_NAMES)
            plane.put([TrajectoryRow(key=k, tags=t, columns=c) for k, t, c in zip(meta.keys, meta.tags, columns, strict=True)])
        checkpoint = save(folder, point, plane)
        assert sorted(plane.keys()) == sorted([*keys, "of-a-group-in-flight"]), "saving takes nothing"
    with a_transfer_queue() as plane:
        assert plane.keys() == []
        found = newest_whole_checkpoint(folder.checkpoints)
        assert (found.path, found.point) == (checkpoint, point)
        asyncio.run(restore_rows(checkpoint, found.point, data_plane=plane))
        assert sorted(plane.keys()) == sorted(keys)
        assert values(plane, keys) == values(expected, keys)
