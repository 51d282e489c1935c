"""`x W^T + b` on the CPU by oneDNN where that is faster than what torch takes.

torch gives float32 products to MKL, which does not use AVX-512 on every processor that has it: one core of an AMD EPYC was seen to do 105
GFLOP/s with it and 200 to 250 with oneDNN, which torch ships too, from some dozen rows on. Both add in float32; results differ by rounding.

oneDNN makes a kernel for each shape it has not seen, which takes about 0.3 ms, and keeps the last 1,024. So a caller whose number of rows
changes all the time rounds it up to `padded_rows`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_STEP, MIN_PADDED_ROWS = 16, 32
MIN_WORK = 3_000_000
"""Multiplications below which the call of oneDNN, about 10 us, costs more than it gains."""
MIN_ROWS = 8
"""With fewer, reading the weight is all the work."""


def has_onednn(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of this kind may go to oneDNN here."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()


def padded_rows(count: int) -> int:
    """The next multiple of ROW_STEP; few rows stay as they are."""
    return count if count < MIN_PADDED_ROWS else -(-count // ROW_STEP) * ROW_STEP


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[R, out] of x [R, in] and weight [out, in]; no gradient is kept. As `torch.nn.functional.linear`, any dtype and device."""
    num_rows = x.shape[0]
    is_large = num_rows >= MIN_ROWS and num_rows * weight.numel() >= MIN_WORK
    if is_large and has_onednn(x.dtype, x.device):
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return product
    return F.linear(x, weight, bias)
