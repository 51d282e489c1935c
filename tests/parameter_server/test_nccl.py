"""Versions over a process group of two. Without GPUs it is gloo's: all but the copies to and from the cards is the same."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from psrl.errors import WeightSyncError
from psrl.parameter_server.transports import nccl
from psrl.parameter_server.transports.nccl import GroupOffer, NcclReader, NcclWriter

HERE = "127.0.0.1"
BYTES = np.arange(3_000_000, dtype=np.uint32).view(np.uint8)
"""12,000,000: eleven chunks of 2**20 and a shorter one."""
WAIT_S = 60.0
WRITER = """
import dataclasses, json, sys
import numpy as np
from psrl.parameter_server.transports.nccl import NcclWriter
writer = NcclWriter(host="127.0.0.1", device=sys.argv[1], chunk_bytes=2**20)
for line in sys.stdin:
    version, session = line.split()
    buffer = np.arange(3_000_000, dtype=np.uint32).view(np.uint8)
    offer = writer.offer(int(version), buffer, reader="other node", session=session)
    print(json.dumps(dataclasses.asdict(offer)), flush=True)
    if len(version) < 3:
        writer.send(offer, timeout_s=60)
"""


@pytest.fixture
def pool():
    with ThreadPoolExecutor() as threads:
        yield threads


def writer_of(**settings):
    return NcclWriter(host=HERE, device="cpu", chunk_bytes=2**20, **settings)


def transfer(pool, writer, reader, version, *, to="other node", sent=BYTES):
    offer = writer.offer(version, sent, reader=to, session=reader.session)
    sending = pool.submit(writer.send, offer, timeout_s=WAIT_S)
    received = reader.read(offer, timeout_s=WAIT_S)
    sending.result(WAIT_S)
    return offer, received


def test_versions_arrive_whole_over_one_group_and_in_their_own_process_group(pool):
    writer, reader = writer_of(), NcclReader()
    assert not reader.has_group
    first, received = transfer(pool, writer, reader, 1)
    assert np.array_equal(received, BYTES)
    assert reader.has_group
    second, received = transfer(pool, writer, reader, 2)
    assert np.array_equal(received, BYTES)
    assert first.port == second.port
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("size_bytes", [1, 2**20 - 1, 2**20, 3 * 2**20 + 1])
def test_a_version_of_any_size_arrives_also_after_a_smaller_one(pool, size_bytes):
    writer, reader = writer_of(), NcclReader()
    for sent in (BYTES[:7], BYTES[:size_bytes], BYTES):
        assert np.array_equal(transfer(pool, writer, reader, 1, sent=sent)[1], sent)


def test_several_readers_are_served_at_the_same_time(pool):
    writer, readers = writer_of(), [NcclReader() for _ in range(3)]
    arrived = pool.map(lambda at: transfer(pool, writer, readers[at], 1, to=f"node {at}"), range(3))
    assert all(np.array_equal(received, BYTES) for _, received in arrived)


def test_a_version_that_was_withdrawn_is_an_error_and_the_next_one_arrives(pool):
    writer, reader = writer_of(), NcclReader()
    transfer(pool, writer, reader, 1)
    offer = writer.offer(2, BYTES, reader="other node", session=reader.session)
    writer.keep_only({3})
    with pytest.raises(WeightSyncError, match="version 2 is no longer offered to other node"):
        writer.send(offer, timeout_s=WAIT_S)
    assert np.array_equal(transfer(pool, writer, reader, 3)[1], BYTES)


def test_a_reader_that_never_comes_is_an_error_within_the_deadline_and_its_successor_is_served(pool):
    writer = writer_of(meet_timeout_s=0.2)
    offer = writer.offer(1, BYTES, reader="other node", session="of one that died")
    with pytest.raises(WeightSyncError, match="cannot send version 1 to other node"):
        writer.send(offer, timeout_s=WAIT_S)
    with pytest.raises(WeightSyncError, match="no longer offered"):
        writer.send(offer, timeout_s=WAIT_S)
    writer = writer_of()
    assert np.array_equal(transfer(pool, writer, NcclReader(), 1)[1], BYTES)
    assert np.array_equal(transfer(pool, writer, NcclReader(), 1)[1], BYTES), "the second began another session"


def test_a_writer_that_never_sends_is_an_error_within_the_deadlines(pool, monkeypatch):
    writer, reader = writer_of(), NcclReader(meet_timeout_s=0.2)
    offer = writer.offer(1, BYTES, reader="other node", session=reader.session)
    with pytest.raises(WeightSyncError, match=r"cannot read version 1 from 127\.0\.0\.1"):
        reader.read(offer, timeout_s=WAIT_S)
    reader = NcclReader()
    offer, _ = transfer(pool, writer, reader, 1)
    monkeypatch.setattr(nccl, "CHUNK_TIMEOUT_S", 0.2)
    with pytest.raises(WeightSyncError, match=r"cannot read version 1 from 127\.0\.0\.1"):
        reader.read(offer, timeout_s=WAIT_S)


def test_a_transfer_that_takes_longer_than_all_of_it_may_is_an_error_on_both_sides(pool):
    writer, reader = writer_of(), NcclReader()
    offer = writer.offer(1, BYTES, reader="other node", session=reader.session)
    sending = pool.submit(writer.send, offer, timeout_s=0.0)
    with pytest.raises(WeightSyncError, match="cannot read version 1"):
        reader.read(offer, timeout_s=WAIT_S)
    with pytest.raises(WeightSyncError, match="cannot send version 1 to other node: it did not end in time"):
        sending.result(WAIT_S)


def test_a_reader_without_a_gpu_is_told_what_to_set_instead():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    offer = GroupOffer(version=1, size_bytes=1, chunk_bytes=1, device="cuda", host=HERE, port=1, reader="x", session="y")
    with pytest.raises(WeightSyncError, match=r"psrl\.ps_mode=cpu_ref"):
        NcclReader().read(offer, timeout_s=WAIT_S)


class OtherProcess:
    """A writer in a process of its own."""

    def __init__(self, device="cpu"):
        self.process = subprocess.Popen([sys.executable, "-c", WRITER, device], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def offer(self, version, session) -> GroupOffer:
        """Sent, too, where the version has fewer than three digits."""
        self.process.stdin.write(f"{version} {session}\n")
        self.process.stdin.flush()
        return GroupOffer(**json.loads(self.process.stdout.readline()))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()


@pytest.mark.slow
def test_another_process_sends_and_its_death_is_an_error_after_which_a_new_writer_is_read():
    reader = NcclReader()
    with OtherProcess() as writer:
        for version in (1, 2):
            assert np.array_equal(reader.read(writer.offer(version, reader.session), timeout_s=WAIT_S), BYTES)
        offer = writer.offer(100, reader.session)
    with pytest.raises(WeightSyncError, match="cannot read version 100"):
        reader.read(offer, timeout_s=WAIT_S)
    with pytest.raises(WeightSyncError, match="the group was left"):
        reader.read(offer, timeout_s=WAIT_S)
    reader = NcclReader()
    with OtherProcess() as writer:
        assert np.array_equal(reader.read(writer.offer(3, reader.session), timeout_s=WAIT_S), BYTES)


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_versions_go_from_one_card_to_another(monkeypatch):
    with OtherProcess("cuda") as writer, torch.cuda.device(1):
        reader = NcclReader()
        for version in (1, 2):
            assert np.array_equal(reader.read(writer.offer(version, reader.session), timeout_s=WAIT_S), BYTES)
        offer = writer.offer(100, reader.session)
    with pytest.raises(WeightSyncError, match="cannot read version 100"):
        reader.read(offer, timeout_s=WAIT_S)
