"""What the processor has, and what OpenBLAS is told because of it."""

import os
import subprocess
import sys

import pytest

from psrl.config import processor
from psrl.config.processor import has_avx512_that_mkl_leaves, is_openblas_told, openblas_environment


@pytest.fixture(autouse=True)
def asked_anew():
    """Both answers are kept for a process."""
    yield
    has_avx512_that_mkl_leaves.cache_clear()
    is_openblas_told.cache_clear()


@pytest.mark.parametrize(("vendor", "flags", "is_left"), [
    ("AuthenticAMD", "fpu avx512f avx512bw avx512cd avx512dq avx512vl", True), ("AuthenticAMD", "fpu avx2 avx512f", False),
    ("GenuineIntel", "fpu avx512f avx512bw avx512cd avx512dq avx512vl", False),
])  # fmt: skip
def test_only_amds_processors_with_all_of_avx512_are_told_apart(vendor, flags, is_left, tmp_path, monkeypatch):
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: {flags}\n\nprocessor\t: 1\nvendor_id\t: {vendor}\n")
    monkeypatch.setattr(processor, "PROCESSOR_FILE", file)
    has_avx512_that_mkl_leaves.cache_clear()
    assert has_avx512_that_mkl_leaves() == is_left
    assert bool(openblas_environment()) == is_left
    monkeypatch.setattr(processor, "PROCESSOR_FILE", tmp_path / "nothing")
    has_avx512_that_mkl_leaves.cache_clear()
    assert not has_avx512_that_mkl_leaves()


@pytest.mark.parametrize(("threads", "is_told"), [("1", True), ("2", False)])
def test_a_process_whose_openblas_has_more_threads_leaves_products_to_torch(threads, is_told, monkeypatch):
    wanted = {"OPENBLAS_CORETYPE": "SkylakeX", "OPENBLAS_NUM_THREADS": "1"}
    monkeypatch.setattr(processor, "openblas_environment", lambda: wanted)
    monkeypatch.setenv("OPENBLAS_CORETYPE", "SkylakeX")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", threads)
    is_openblas_told.cache_clear()
    assert is_openblas_told() == is_told
    is_openblas_told.cache_clear()


def test_numpy_starts_and_multiplies_with_what_openblas_is_told():
    has_avx512_that_mkl_leaves.cache_clear()
    code = "import numpy as np; print(float((np.ones((64, 64), np.float32) @ np.ones((64, 64), np.float32)).sum()))"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **openblas_environment()}, capture_output=True, check=True)
    assert float(done.stdout) == 64**3
