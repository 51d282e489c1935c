"""The weights in whole, gathered from the ranks tensor by tensor: what engines are sent, and what a Hugging Face folder holds.

Engines are sent the policy as training computes it: every tensor in `served_dtype`; with an adapter (unless `lora_merge`) the adapter
alone, in float32 and with its scale multiplied into B, so that a merged weight is W + B A and nothing else need be known. A folder holds
merged weights.

With shards, every rank must go through all tensors; each must be used before the next update, which may change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from psrl.config.model import ModelConfig
from psrl.training.adapter import ADAPTER, adapted_layers, scale_of
from psrl.training.model import DTYPES, PolicyModel

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

Named = Iterator[tuple[str, Tensor]]
Whole = Callable[[Tensor], Tensor]
"""A parameter in whole, or something of its shape and dtype."""


def published(model: PolicyModel, settings: ModelConfig) -> Named:
    """What engines are sent, by Hugging Face's names; of an adapter `<layer>.lora_A.weight` [r, in], `<layer>.lora_B.weight` [out, r]."""
    return _published(model, settings, _whole)


def published_shapes(model: PolicyModel, settings: ModelConfig) -> Named:
    """The same names, shapes and dtypes on the device `meta`; nothing is gathered."""
    return _published(model, settings, lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))


def merged(model: PolicyModel, dtype: torch.dtype, whole: Whole | None = None) -> Named:
    """All weights by Hugging Face parameter name, tied ones once, adapters merged into them in float32."""
    whole = whole or _whole
    adapters = {f"{name}.base_layer.weight": layer for name, layer in adapted_layers(model.causal_lm).items()}
    for name, parameter in model.causal_lm.named_parameters():
        if ".lora_" in name:
            continue
        tensor = whole(parameter)
        if name in adapters:
            a, b = _factors(adapters[name], whole)
            tensor = tensor.float() + b @ a
        yield name.replace(".base_layer.", "."), tensor.to(dtype)


def adapter(model: PolicyModel) -> Named:
    """The adapter alone, by the names and with the values of peft's own files."""
    for name, parameter in model.causal_lm.named_parameters():
        if ".lora_" in name:
            yield f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}", _whole(parameter)


def kept_by_first(named: Named, *, rank: int) -> dict[str, Tensor]:
    """Copies on the CPU at rank 0; the others take part in the gathering and keep nothing."""
    kept = {}
    for name, tensor in named:
        if rank == 0:
            kept[name] = tensor.to("cpu", copy=True).contiguous()
    return kept


def named_full_tensors(model: PolicyModel, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Copies of all merged weights on the CPU of every rank, by default in the dtype of the first parameter."""
    return kept_by_first(merged(model, dtype or next(model.parameters()).dtype), rank=0)


def _published(model: PolicyModel, settings: ModelConfig, whole: Whole) -> Named:
    adapters = adapted_layers(model.causal_lm)
    if adapters and not settings.lora_merge:
        for name, layer in adapters.items():
            a, b = _factors(layer, whole)
            yield f"{name}.lora_A.weight", a
            yield f"{name}.lora_B.weight", b
        return
    yield from merged(model, DTYPES[settings.served_dtype], whole)


def _factors(layer: LoraLayer, whole: Whole) -> tuple[Tensor, Tensor]:
    """(A, scale B)."""
    return whole(layer.lora_A[ADAPTER].weight), whole(layer.lora_B[ADAPTER].weight) * scale_of(layer)


def _whole(parameter: Tensor) -> Tensor:
    tensor = parameter.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    # Offloaded parts are gathered by the cards, which is faster than by the hosts.
    return tensor.to(tensor.device_mesh.device_type).full_tensor()
