"""The model's parameters, fused for few kernels, read from tensors with Hugging Face's names.

A version is checked whole before anything is made of it, and never written to: the forward pass may read it where a parameter server
has put it, which every replica on the node does, so that all of them share one copy.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from psrl.engines.torch.architecture import Architecture
from psrl.errors import EngineError, WeightSyncError


@dataclass(slots=True)
class Layer:
    """One decoder block."""

    input_norm: torch.Tensor  # [hidden]
    qkv: torch.Tensor  # [(heads + 2 kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim]: the weights of q_norm for each head, then those of k_norm
    output: torch.Tensor  # [hidden, heads * head_dim]
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [hidden, intermediate]
    down_bias: torch.Tensor | None


class Weights:
    """All parameters on one device."""

    def __init__(self, shape: Architecture, source: ParameterSource) -> None:
        """Take every parameter of the architecture from `source`."""
        self.shape = shape
        self.embedding = source.tensor("model.embed_tokens.weight", shape.vocab_size, shape.hidden_size)
        self.layers = [_layer(f"model.layers.{index}.", shape, source) for index in range(shape.num_layers)]
        self.final_norm = source.tensor("model.norm.weight", shape.hidden_size)
        tied = shape.has_tied_embeddings
        self.head = self.embedding if tied else source.tensor("lm_head.weight", shape.vocab_size, shape.hidden_size)

    @classmethod
    def of(cls, shape: Architecture, given: Mapping[str, torch.Tensor], *, dtype: torch.dtype, device: torch.device) -> Weights:
        """Check `given` whole, then read it. Tensors with this dtype on this device are used where they lie: they must not change.

        `lm_head.weight` may come along where embeddings are tied; it must then equal the embedding and is not counted.

        Raises:
            WeightSyncError: Tensors are missing, unknown, or of another shape or no floating-point type.
        """
        _check(shape, given)
        return cls(shape, GivenTensors(given, dtype=dtype, device=device))


class ParameterSource(Protocol):
    """Where a model's parameters come from."""

    @abstractmethod
    def tensor(self, name: str, *size: int) -> torch.Tensor:
        """One parameter."""

    @abstractmethod
    def fused(self, prefix: str, rows_of: Mapping[str, int], kind: str, *columns: int) -> torch.Tensor:
        """`<prefix><name>.<kind>` of each name, as one tensor [sum of rows, *columns]."""


class ExpectedShapes(ParameterSource):
    """Only notes what an architecture asks for."""

    def __init__(self) -> None:
        self.by_name: dict[str, tuple[int, ...]] = {}

    def tensor(self, name: str, *size: int) -> torch.Tensor:
        """Nothing but its shape."""
        self.by_name[name] = size
        return torch.empty(size, device="meta")

    def fused(self, prefix: str, rows_of: Mapping[str, int], kind: str, *columns: int) -> torch.Tensor:
        """Nothing but its shape."""
        for name, rows in rows_of.items():
            self.tensor(f"{prefix}{name}.{kind}", rows, *columns)
        return torch.empty((sum(rows_of.values()), *columns), device="meta")


class GivenTensors(ParameterSource):
    """Checked tensors by name, as they are where they fit."""

    def __init__(self, given: Mapping[str, torch.Tensor], *, dtype: torch.dtype, device: torch.device) -> None:
        self._given, self._dtype, self._device = given, dtype, device

    def tensor(self, name: str, *size: int) -> torch.Tensor:
        """A copy only where dtype or device differ."""
        return self._given[name].to(self._device, self._dtype)

    def fused(self, prefix: str, rows_of: Mapping[str, int], kind: str, *columns: int) -> torch.Tensor:
        """A copy only where they do not lie one behind the other."""
        parts = [self.tensor(f"{prefix}{name}.{kind}", rows, *columns) for name, rows in rows_of.items()]
        if all(_follows(one, next_one) for one, next_one in pairwise(parts)):
            return parts[0].as_strided((sum(rows_of.values()), *columns), parts[0].stride())
        return torch.cat(parts)


def num_parameters(shape: Architecture) -> int:
    """Named tensors of a model."""
    return len(_expected(shape))


def _expected(shape: Architecture) -> dict[str, tuple[int, ...]]:
    shapes = ExpectedShapes()
    Weights(shape, shapes)
    return shapes.by_name


def _check(shape: Architecture, given: Mapping[str, torch.Tensor]) -> None:
    expected = _expected(shape)
    names = set(given) - ({"lm_head.weight"} if shape.has_tied_embeddings else set())
    missing, unknown = sorted(set(expected) - names), sorted(names - set(expected))
    if missing or unknown:
        matching = len(names & set(expected))
        raise WeightSyncError(f"{matching} of {len(expected)} tensors match; missing {missing[:5]}, unknown {unknown[:5]}")
    for name, size in expected.items():
        if tuple(given[name].shape) != size:
            raise WeightSyncError(f"tensor {name} has shape {tuple(given[name].shape)}, the model has {size}")
        if not given[name].is_floating_point():
            raise WeightSyncError(f"tensor {name} is {given[name].dtype}, not a floating-point type")
    head = given.get("lm_head.weight")
    if shape.has_tied_embeddings and head is not None and not torch.equal(head, given["model.embed_tokens.weight"]):
        raise WeightSyncError("lm_head.weight differs from model.embed_tokens.weight, but the model ties them")


def _follows(one: torch.Tensor, next_one: torch.Tensor) -> bool:
    """Whether the second begins where the first ends, in the same storage."""
    is_shared = one.untyped_storage().data_ptr() == next_one.untyped_storage().data_ptr()
    is_whole = one.is_contiguous() and next_one.is_contiguous()
    return is_shared and is_whole and next_one.storage_offset() == one.storage_offset() + one.numel()


def _layer(prefix: str, shape: Architecture, source: ParameterSource) -> Layer:
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    attention = prefix + "self_attn."
    qkv_names = {"q_proj": q, "k_proj": kv, "v_proj": kv}
    mlp_names = {"gate_proj": inner, "up_proj": inner}
    return Layer(
        input_norm=source.tensor(prefix + "input_layernorm.weight", hidden),
        qkv=source.fused(attention, qkv_names, "weight", hidden),
        qkv_bias=source.fused(attention, qkv_names, "bias") if shape.has_qkv_bias else None,
        qk_norm=_qk_norm(attention, shape, source) if shape.has_qk_norm else None,
        output=source.tensor(attention + "o_proj.weight", hidden, q),
        output_bias=source.tensor(attention + "o_proj.bias", hidden) if shape.has_output_bias else None,
        mlp_norm=source.tensor(prefix + "post_attention_layernorm.weight", hidden),
        gate_up=source.fused(prefix + "mlp.", mlp_names, "weight", hidden),
        gate_up_bias=source.fused(prefix + "mlp.", mlp_names, "bias") if shape.has_mlp_bias else None,
        down=source.tensor(prefix + "mlp.down_proj.weight", hidden, inner),
        down_bias=source.tensor(prefix + "mlp.down_proj.bias", hidden) if shape.has_mlp_bias else None,
    )


def _qk_norm(prefix: str, shape: Architecture, source: ParameterSource) -> torch.Tensor:
    q, k = (source.tensor(f"{prefix}{name}_norm.weight", shape.head_dim) for name in ("q", "k"))
    return torch.cat((q.expand(shape.num_heads, -1), k.expand(shape.num_kv_heads, -1)))


def load_folder(model_path: Path, shape: Architecture, *, dtype: torch.dtype, device: torch.device) -> Weights:
    """Read all `*.safetensors` of a Hugging Face folder.

    Raises:
        EngineError: No weights, or not those of the architecture.
    """
    files = sorted(model_path.glob("*.safetensors"))
    if not files:
        raise EngineError(f"model {model_path} has no *.safetensors files")
    given: dict[str, torch.Tensor] = {}
    try:
        for path in files:
            with safe_open(path, framework="pt") as opened:
                given.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118 (not a dict)
        parameters = {name: tensor for name, tensor in given.items() if not name.endswith("rotary_emb.inv_freq")}
        return Weights.of(shape, parameters, dtype=dtype, device=device)
    except (OSError, SafetensorError, WeightSyncError) as error:
        raise EngineError(f"model {model_path}: {error}") from error
