"""What this machine's processor has that libraries do not find out by themselves."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

PROCESSOR_FILE = Path("/proc/cpuinfo")
AVX512 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
"""What OpenBLAS's kernels for `SkylakeX` are made of."""


@cache
def has_avx512_that_mkl_leaves() -> bool:
    """Whether there is AVX-512 which MKL does not use, because the processor is not Intel's."""
    text = PROCESSOR_FILE.read_text() if PROCESSOR_FILE.exists() else ""
    fields = dict(line.split(":", 1) for line in text.split("\n\n")[0].splitlines() if ":" in line)
    named = {name.strip(): value.split() for name, value in fields.items()}
    return named.get("vendor_id") == ["AuthenticAMD"] and set(named.get("flags", ())) >= AVX512


def openblas_environment() -> dict[str, str]:
    """What tells numpy's OpenBLAS to use it; must be set before numpy is imported, and on this machine only.

    By itself OpenBLAS 0.3.31 takes kernels of AVX2 on a Zen 5, which it does not know yet: 123 GFLOP/s a core instead of 240. More than
    one thread of its own would wait busily beside torch's.
    """
    return {"OPENBLAS_CORETYPE": "SkylakeX", "OPENBLAS_NUM_THREADS": "1"} if has_avx512_that_mkl_leaves() else {}


@cache
def is_openblas_told() -> bool:
    """Whether this process was started with an `openblas_environment`; products of one that was not are left to torch."""
    wanted = openblas_environment()
    return bool(wanted) and all(os.environ.get(name) == value for name, value in wanted.items())
