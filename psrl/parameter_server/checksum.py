"""The checksum over a whole version, without torch: the scripted engine checks versions too."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np

CHUNK_BYTES = 8 * 2**20
"""Of the buffer per checksum task; zlib lets go of the interpreter lock, so chunks run on both cores."""
CHECKSUM_THREADS = 2


def checksum(buffer: memoryview | np.ndarray | bytes) -> str:
    """CRC-32 of each 8 MiB, then of all of these and the length: any changed bit and any burst up to 32 bits changes it."""
    flat = np.frombuffer(buffer, dtype=np.uint8)
    chunks = [flat[start : start + CHUNK_BYTES] for start in range(0, flat.nbytes, CHUNK_BYTES)]
    if len(chunks) > 1:
        with ThreadPoolExecutor(CHECKSUM_THREADS) as threads:
            sums = list(threads.map(zlib.crc32, chunks))
    else:
        sums = [zlib.crc32(chunk) for chunk in chunks]
    whole = zlib.crc32(np.array([*sums, flat.nbytes], dtype="<u8").tobytes())
    return f"crc32x8m:{whole:08x}:{flat.nbytes}"
