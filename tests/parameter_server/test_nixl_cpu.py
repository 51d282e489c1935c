"""One-sided reads of a version out of another process's memory. `scripts/setup.sh tests` installs NIXL."""

import subprocess
import sys

import numpy as np
import pytest

from psrl.errors import WeightSyncError
from psrl.parameter_server.transports import nixl_cpu
from psrl.parameter_server.transports.nixl_cpu import MemoryOffer, NixlReader

WRITER = """
import sys
import numpy as np
from psrl.parameter_server.transports.nixl_cpu import NixlWriter
writer = NixlWriter()
offer = writer.offer(7, np.arange(3_000_000, dtype=np.uint32).view(np.uint8))
assert writer.offer(7, np.zeros(1, np.uint8)) == offer
print(offer.metadata.hex(), offer.address, offer.size_bytes, flush=True)
sys.stdin.readline()
writer.keep_only(set())
print("withdrawn", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def writer():
    with subprocess.Popen([sys.executable, "-c", WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def offer_of(writer):
    line = next(line for line in writer.stdout if "NIXL" not in line)
    metadata, address, size_bytes = line.split()
    return MemoryOffer(metadata=bytes.fromhex(metadata), address=int(address), size_bytes=int(size_bytes))


@pytest.mark.slow
def test_a_version_is_read_whole_from_another_process_twice(writer):
    offer, reader = offer_of(writer), NixlReader()
    for _ in range(2):
        assert np.array_equal(reader.read(offer, timeout_s=60).view(np.uint32), np.arange(3_000_000, dtype=np.uint32))


@pytest.mark.slow
def test_a_writer_that_has_died_is_an_error_within_the_deadline(writer):
    offer, reader = offer_of(writer), NixlReader()
    reader.read(offer, timeout_s=60)
    writer.kill()
    writer.wait(10)
    with pytest.raises(WeightSyncError):
        reader.read(offer, timeout_s=5)


def test_without_nixl_the_error_names_the_package(monkeypatch):
    monkeypatch.setattr(nixl_cpu, "MODULES", ("no_such_nixl",))
    with pytest.raises(WeightSyncError, match="pip install nixl"):
        NixlReader()
