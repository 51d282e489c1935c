"""Layout, checksum, shared memory and the version store."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psrl.errors import WeightSyncError
from psrl.parameter_server.layout import checksum, lay_out, pack, read_tensors
from psrl.parameter_server.transports.shared_memory import open_version, remove, write_buffer, write_version
from psrl.parameter_server.versions import VersionStore

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


BUFFER = np.zeros(20_000_000, np.uint8)  # three chunks of the checksum


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 20_000_000 * 8 - 1))
def test_any_flipped_bit_changes_the_checksum(bit):
    before = checksum(BUFFER)
    BUFFER[bit // 8] ^= 1 << bit % 8
    after = checksum(BUFFER)
    BUFFER[bit // 8] ^= 1 << bit % 8
    assert before != after


def test_what_was_written_is_read_back_without_a_copy(tmp_path):
    manifest = write_version(tmp_path, TENSORS, 4)
    buffer = open_version(manifest)
    assert checksum(buffer) == manifest.checksum
    read = read_tensors(buffer, manifest)
    assert all(torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype for name, tensor in TENSORS)
    assert read["c"].data_ptr() == buffer.ctypes.data + 128
    remove(manifest)
    remove(manifest)
    assert torch.equal(read["a"], TENSORS[0][1])
    assert list(tmp_path.iterdir()) == []


def test_a_push_that_fails_leaves_no_file(tmp_path):
    manifest = lay_out(TENSORS, version=1)
    with pytest.raises(WeightSyncError, match="bytes"):
        write_buffer(tmp_path, manifest, np.zeros(10, np.uint8))
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(WeightSyncError, match="cannot write"):
        write_buffer(blocked, manifest, np.zeros(manifest.total_bytes, np.uint8))
    assert list(tmp_path.iterdir()) == [blocked]


def test_a_cut_file_is_refused(tmp_path):
    manifest = write_version(tmp_path, TENSORS, 1)
    with pytest.raises(WeightSyncError, match="192 bytes"):
        open_version(dataclasses.replace(manifest, total_bytes=256))


@pytest.mark.parametrize(
    ("tensors", "cause"),
    [
        (TENSORS[:-1], "not given"),
        ([*TENSORS, ("d", torch.zeros(1))], "d is not in the manifest"),
        ([*TENSORS[:-1], ("c", torch.zeros(2))], "c is"),
    ],
)
def test_packing_other_tensors_than_laid_out_is_refused(tensors, cause):
    manifest = lay_out(TENSORS, version=1)
    with pytest.raises(WeightSyncError, match=cause):
        pack(tensors, manifest, np.zeros(manifest.total_bytes, np.uint8))


def manifest_of(version):
    return lay_out([], version=version)


def test_a_push_is_seen_only_after_its_commit_and_the_oldest_falls_out():
    store = VersionStore[str](keep=2)
    with pytest.raises(WeightSyncError, match="no version"):
        store.latest()
    for version in (1, 2):
        store.begin_push(version)
        assert version not in store.versions
        assert store.commit_push(manifest_of(version), f"ref{version}") == ()
    store.begin_push(3)
    store.abort_push()
    assert store.latest().reference == "ref2"
    store.begin_push(3)
    (dropped,) = store.commit_push(manifest_of(3), "ref3")
    assert (dropped.reference, store.versions) == ("ref1", (2, 3))
    with pytest.raises(WeightSyncError, match="not held"):
        store.get(1)


def test_one_writer_or_many_readers_never_both():
    store = VersionStore[str](keep=1)
    store.begin_push(1)
    for forbidden in (lambda: store.begin_push(2), store.begin_pull, lambda: store.commit_push(manifest_of(9), "")):
        with pytest.raises(WeightSyncError):
            forbidden()
    store.commit_push(manifest_of(1), "one")
    assert store.begin_pull().reference == store.begin_pull(1).reference == "one"
    store.end_pull(1)
    with pytest.raises(WeightSyncError, match="being pulled"):
        store.begin_push(2)
    store.end_pull(1)
    with pytest.raises(WeightSyncError, match="not being pulled"):
        store.end_pull(1)
    with pytest.raises(WeightSyncError, match="not newer"):
        store.begin_push(1)
    store.begin_push(2)
