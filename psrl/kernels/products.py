"""Products of float32 matrices on one CPU thread by numpy's OpenBLAS, for engines, and with their gradient for training.

On AMD's processors with AVX-512 torch's products (MKL) do 107 GFLOP/s a core and OpenBLAS's 240, for any shape and without making a kernel
for each, which oneDNN does (it keeps 0.6 MB for every number of tokens that it has seen). Products read and write the tensors' own memory.
With several threads, on other processors and for other numbers they are torch's.

OpenBLAS reads the kind of its kernels (`config.processor.openblas_environment`) and the number of its threads from the environment.

Legend: M, K, N sizes of a product; I inputs and O outputs of a layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from psrl.config.processor import is_openblas_told

MAX_PART = 2**20
"""Elements of a sum that are computed before they are added."""
MIN_ROWS = 64
"""Of states; with fewer MKL was seen to be as fast or faster."""


def is_by_openblas(states: Tensor) -> bool:
    """Whether products of such states are."""
    is_plain = states.dtype == torch.float32 and states.device.type == "cpu"
    return is_plain and torch.get_num_threads() == 1 and is_openblas_told()


def product(a_MK: Tensor, b_KN: Tensor, *, out: Tensor | None = None) -> Tensor:
    """a @ b, [M, N], without gradient; a and b may be transposed views."""
    if not is_by_openblas(a_MK):
        return torch.mm(a_MK, b_KN, out=out)
    if out is None:
        out = torch.empty(a_MK.shape[0], b_KN.shape[1])
    # `Tensor.numpy` would forbid FSDP2 to free a gathered weight, whatever becomes of the array.
    np.matmul(np.from_dlpack(a_MK.detach()), np.from_dlpack(b_KN.detach()), out=out.numpy())
    return out


def add_product(total_MN: Tensor, a_MK: Tensor, b_KN: Tensor) -> None:
    """total += a @ b, where `total` is of float32 and large: no second one is held."""
    if a_MK.dtype != torch.float32:
        total_MN += torch.mm(a_MK, b_KN)
    elif not is_by_openblas(a_MK):
        total_MN.addmm_(a_MK, b_KN)
    else:
        num_rows = max(1, MAX_PART // total_MN.shape[1])
        for start in range(0, len(total_MN), num_rows):
            total_MN[start : start + num_rows] += product(a_MK[start : start + num_rows], b_KN)


def linear(states: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`: [..., O] of states [..., I], with its gradient where one is kept."""
    if states.shape[:-1].numel() < MIN_ROWS or not is_by_openblas(states):
        return F.linear(states, weight_OI, bias_O)
    if not torch.is_grad_enabled():
        return _layer(states, weight_OI, bias_O)
    result: Tensor = _Linear.apply(states, weight_OI, bias_O)  # type: ignore[no-untyped-call]
    return result


class Linear(nn.Linear):
    """A linear layer with these products."""

    def forward(self, input: Tensor) -> Tensor:
        """As `linear`."""
        return linear(input, self.weight, self.bias)


def use_products(model: nn.Module) -> None:
    """Have every plain linear layer of a model compute by `linear`; its parameters, their names and its hooks stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear


def _layer(states: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    result_MO = product(states.flatten(0, -2), weight_OI.t())
    if bias_O is not None:
        result_MO += bias_O
    return result_MO.view(*states.shape[:-1], -1)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(states, weight_OI)
        return _layer(states, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        states, weight_OI = ctx.saved_tensors
        needs_states, needs_weight, needs_bias = ctx.needs_input_grad
        grad_MO = grad.flatten(0, -2)
        return (
            product(grad_MO, weight_OI).view(states.shape) if needs_states else None,
            product(grad_MO.t(), states.flatten(0, -2)) if needs_weight else None,
            grad_MO.sum(0) if needs_bias else None,
        )
