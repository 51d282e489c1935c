"""A low-rank adapter as a weight version: the matrices of the start plus B A, everything else shared with the start.

A version is an adapter where its tensors are named `<layer>.lora_A.weight` [r, in] and `<layer>.lora_B.weight` [out, r]; the trainer has
multiplied its scale into B. Sums are made in float32 from the weights of the start each time, so that no rounding adds up over versions.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping

import torch

from psrl.engines.torch.architecture import Architecture
from psrl.engines.torch.weights import Layer, Weights
from psrl.errors import WeightSyncError

A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"

Factors = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""(A, B) by the layer's name."""


def is_adapter(names: Iterable[str]) -> bool:
    """Whether tensors of these names are an adapter, and not a model."""
    return any(name.endswith((A_SUFFIX, B_SUFFIX)) for name in names)


def with_adapter(start: Weights, given: Mapping[str, torch.Tensor]) -> Weights:
    """The start with the adapter merged into it. Nothing of the start changes.

    Raises:
        WeightSyncError: A tensor has no layer or no partner, or the shapes do not fit the model.
    """
    factors = _factors_of(given)
    merged = copy.copy(start)
    merged.layers = [_merged(f"model.layers.{index}.", layer, start.shape, factors) for index, layer in enumerate(start.layers)]
    if factors:
        raise WeightSyncError(f"the adapter has layers that the model has not, such as {sorted(factors)[:3]}")
    return merged


def _factors_of(given: Mapping[str, torch.Tensor]) -> Factors:
    names = {name.removesuffix(A_SUFFIX).removesuffix(B_SUFFIX) for name in given}
    expected = {f"{name}{suffix}" for name in names for suffix in (A_SUFFIX, B_SUFFIX)}
    if expected != set(given):
        raise WeightSyncError(f"an adapter needs A and B of each layer and nothing else; differing: {sorted(expected ^ set(given))[:5]}")
    return {name: (given[name + A_SUFFIX], given[name + B_SUFFIX]) for name in names}


def _merged(prefix: str, layer: Layer, shape: Architecture, factors: Factors) -> Layer:
    """The layer with its part of the factors, which is taken out of them."""
    q, kv, inner = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.intermediate_size
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    return dataclasses.replace(
        layer,
        qkv=_sum(layer.qkv, {attention + "q_proj": q, attention + "k_proj": kv, attention + "v_proj": kv}, factors),
        output=_sum(layer.output, {attention + "o_proj": shape.hidden_size}, factors),
        gate_up=_sum(layer.gate_up, {mlp + "gate_proj": inner, mlp + "up_proj": inner}, factors),
        down=_sum(layer.down, {mlp + "down_proj": shape.hidden_size}, factors),
    )


def _sum(matrix: torch.Tensor, rows_of: Mapping[str, int], factors: Factors) -> torch.Tensor:
    """The fused matrix with B A added to the rows of each name; the matrix itself where none has factors."""
    if not factors.keys() & rows_of.keys():
        return matrix
    total, start = matrix.to(torch.float32, copy=True), 0
    for name, num_rows in rows_of.items():
        if name in factors:
            a, b = (factor.to(matrix.device, torch.float32) for factor in factors.pop(name))
            if a.ndim != 2 or b.shape != (num_rows, a.shape[0]) or a.shape[1] != matrix.shape[1]:
                sizes = f"A {tuple(a.shape)}, B {tuple(b.shape)}"
                raise WeightSyncError(f"the adapter of {name} has {sizes}; the layer is {(num_rows, matrix.shape[1])}")
            total[start : start + num_rows].addmm_(b, a)
        start += num_rows
    return total.to(matrix.dtype)
