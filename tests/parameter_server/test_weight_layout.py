"""Layout, checksum and shared memory."""

import dataclasses
import os
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.errors import WeightSyncError
from psrl.parameter_server.checksum import checksum
from psrl.parameter_server.layout import lay_out, pieces_of, read_tensors
from psrl.parameter_server.push import publish_tensors
from psrl.parameter_server.transports.shared_memory import open_version, publish

TENSORS = [
    ("a", torch.arange(3.0)),
    ("b.weight", torch.ones(2, 2, dtype=torch.bfloat16)),
    ("empty", torch.zeros(0, 4)),
    ("c", torch.tensor(7.0)),
]


def test_slices_begin_at_multiples_of_64_bytes():
    manifest = lay_out(TENSORS, version=4)
    # 3 float32 = 12 bytes, 4 bfloat16 = 8 bytes, nothing, 1 float32 = 4 bytes; each rounded up to 64.
    assert [(one.offset, one.size_bytes) for one in manifest.tensors] == [(0, 12), (64, 8), (128, 0), (128, 4)]
    assert (manifest.total_bytes, manifest.version) == (192, 4)


def test_weights_of_a_block_lie_side_by_side_also_where_biases_come_between():
    names = ["m.0.attn.q.weight", "m.0.attn.q.bias", "m.0.attn.k.weight", "m.0.attn.k.bias", "m.0.norm.weight", "m.1.attn.q.weight", "head"]
    manifest = lay_out([(name, torch.zeros(1)) for name in names], version=1)
    assert [piece.name for piece in manifest.tensors] == [
        *("m.0.attn.q.weight", "m.0.attn.k.weight", "m.0.attn.q.bias", "m.0.attn.k.bias"),
        *("m.0.norm.weight", "m.1.attn.q.weight", "head"),
    ]


BUFFER = np.zeros(20_000_000, np.uint8)  # three chunks of the checksum


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 20_000_000 * 8 - 1))
def test_any_flipped_bit_changes_the_checksum(bit):
    before = checksum(BUFFER)
    BUFFER[bit // 8] ^= 1 << bit % 8
    after = checksum(BUFFER)
    BUFFER[bit // 8] ^= 1 << bit % 8
    assert before != after


def num_open_files():
    return len(os.listdir("/proc/self/fd"))


def test_what_was_written_is_read_back_without_a_copy():
    shared = publish_tensors(dict(TENSORS), 4)
    buffer = open_version(shared.manifest)
    assert checksum(buffer) == shared.manifest.checksum
    read = read_tensors(buffer, shared.manifest)
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in TENSORS)
    assert read["c"].data_ptr() == buffer.ctypes.data + 128
    shared.close()
    shared.close()
    assert torch.equal(read["a"], TENSORS[0][1])
    with pytest.raises(WeightSyncError, match="cannot map"):
        open_version(shared.manifest)


def test_a_published_version_cannot_be_changed_by_anyone():
    shared = publish_tensors(dict(TENSORS), 4)
    with pytest.raises(PermissionError), open(shared.manifest.location["path"], "r+b") as file:
        file.write(b"x")
    with pytest.raises(PermissionError):
        os.truncate(shared.manifest.location["path"], 10)
    mine = read_tensors(open_version(shared.manifest), shared.manifest)["a"]
    mine.zero_()
    assert torch.equal(read_tensors(open_version(shared.manifest), shared.manifest)["a"], TENSORS[0][1])
    shared.close()


def test_a_push_that_fails_leaves_nothing_open():
    manifest = lay_out(TENSORS, version=1)
    before = num_open_files()
    with pytest.raises(WeightSyncError, match="not given"):
        publish(manifest, pieces_of(TENSORS[:1], manifest))
    with pytest.raises(WeightSyncError, match="arrived with checksum"):
        publish(dataclasses.replace(manifest, checksum="crc32x8m:0:192"), pieces_of(TENSORS, manifest))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # stands for memory that runs out
    try:
        with pytest.raises(WeightSyncError, match=r"cannot hold version 1 \(192 bytes\) in memory"):
            publish(manifest, pieces_of(TENSORS, manifest))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert num_open_files() == before


def test_a_cut_version_is_refused():
    shared = publish_tensors(dict(TENSORS), 1)
    with pytest.raises(WeightSyncError, match="192 bytes"):
        open_version(dataclasses.replace(shared.manifest, total_bytes=256))
    shared.close()


def test_another_file_in_the_place_of_a_version_is_refused():
    first = publish_tensors(dict(TENSORS), 1)
    first.close()
    second = publish_tensors(dict(TENSORS), 2)  # gets the first one's number
    assert second.manifest.location["path"] == first.manifest.location["path"]
    with pytest.raises(WeightSyncError, match="no longer there"):
        open_version(first.manifest)
    second.close()


OWNER = """
import sys, torch
from psrl.parameter_server.push import publish_tensors
shared = publish_tensors({"a": torch.ones(1000)}, 1)
print(shared.manifest.location["path"], shared.manifest.location["inode"], shared.manifest.checksum, flush=True)
sys.stdin.read()
"""


def shared_memory_names():
    """Other programs' semaphores and Python's own segments come and go."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("sem.", "psm_"))}


def test_another_process_maps_it_and_nothing_stays_when_the_owner_is_killed():
    names_before = shared_memory_names()
    with subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        path, inode, expected = owner.stdout.readline().split()
        manifest = lay_out([("a", torch.ones(1000))], version=1)
        manifest = dataclasses.replace(manifest, location={"transport": "shared_memory", "path": path, "inode": inode})
        buffer = open_version(manifest)
        owner.kill()
        owner.wait(10)
    assert checksum(buffer) == expected
    with pytest.raises(WeightSyncError, match="cannot map"):
        open_version(manifest)
    assert shared_memory_names() == names_before


@pytest.mark.parametrize(
    ("tensors", "cause"),
    [
        (TENSORS[:-1], "not given"),
        ([*TENSORS, ("d", torch.zeros(1))], "d is not in the manifest"),
        ([*TENSORS[:-1], ("c", torch.zeros(2))], "c is"),
    ],
)
def test_writing_other_tensors_than_laid_out_is_refused(tensors, cause):
    manifest = lay_out(TENSORS, version=1)
    with pytest.raises(WeightSyncError, match=cause):
        publish(manifest, pieces_of(tensors, manifest))
