"""Holes in malloc's heap go back to the operating system; what is in use stays."""

import ctypes

import psutil
import pytest

from psrl.training.heap import Heap

pytestmark = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="only glibc keeps freed memory and can be asked for it"
)

BLOCK, NUM_BLOCKS = 64 * 1024, 1600
"""Below glibc's smallest threshold for memory of its own, so that blocks come from the heap: 100 MiB."""


@pytest.fixture
def held_mib():
    """Fill the heap with blocks, free all but the last one, which keeps the others from going back by themselves."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    blocks = [libc.malloc(BLOCK) for _ in range(NUM_BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BLOCK)
    for block in blocks[:-1]:
        libc.free(block)
    yield lambda: psutil.Process().memory_full_info().uss / 2**20
    libc.free(blocks[-1])


def test_memory_that_nothing_uses_goes_back_when_the_time_has_come(held_mib):
    heap, before = Heap(trim_every_s=0.0), held_mib()
    heap.give_back()
    assert held_mib() < before - 80


def test_memory_is_kept_until_then(held_mib):
    heap, before = Heap(trim_every_s=3600.0), held_mib()
    heap.give_back()
    assert held_mib() > before - 20
