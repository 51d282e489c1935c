"""The model's parameters, fused for few kernels, still reachable under their Hugging Face names.

Invariant: `named` are views of the fused matrices that the forward pass reads, so writing a named tensor changes the model at once.
A version is checked whole before its first byte is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
    q_norm: torch.Tensor | None  # [head_dim]
    k_norm: torch.Tensor | None  # [head_dim]
    output: torch.Tensor  # [hidden, heads * head_dim]
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: torch.Tensor  # [2 * intermediate, hidden]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [hidden, intermediate]
    down_bias: torch.Tensor | None


class Weights:
    """All parameters on one device."""

    def __init__(self, shape: Architecture, *, dtype: torch.dtype, device: torch.device) -> None:
        """Empty (uninitialised) tensors of the architecture."""
        self.shape = shape
        self.named: dict[str, torch.Tensor] = {}
        self._dtype, self._device = dtype, device
        self.embedding = self._add("model.embed_tokens.weight", shape.vocab_size, shape.hidden_size)
        self.layers = [self._layer(f"model.layers.{index}.") for index in range(shape.num_layers)]
        self.final_norm = self._add("model.norm.weight", shape.hidden_size)
        self.head = self.embedding if shape.has_tied_embeddings else self._add("lm_head.weight", shape.vocab_size, shape.hidden_size)

    def check(self, given: Mapping[str, torch.Tensor]) -> int:
        """How many tensors match; all must.

        `lm_head.weight` may come along where embeddings are tied; it must then equal the embedding and is not counted.

        Raises:
            WeightSyncError: Tensors are missing, unknown, or of another shape or dtype.
        """
        names = set(given) - ({"lm_head.weight"} if self.shape.has_tied_embeddings else set())
        missing, unknown = sorted(set(self.named) - names), sorted(names - set(self.named))
        if missing or unknown:
            raise WeightSyncError(
                f"{len(names & set(self.named))} of {len(self.named)} tensors match; missing {missing[:5]}, unknown {unknown[:5]}"
            )
        for name, own in self.named.items():
            if tuple(given[name].shape) != tuple(own.shape):
                raise WeightSyncError(f"tensor {name} has shape {tuple(given[name].shape)}, the model has {tuple(own.shape)}")
            if not given[name].is_floating_point():
                raise WeightSyncError(f"tensor {name} is {given[name].dtype}, not a floating-point type")
        head, embedding = given.get("lm_head.weight"), given["model.embed_tokens.weight"]
        if self.shape.has_tied_embeddings and head is not None and not torch.equal(head, embedding):
            raise WeightSyncError("lm_head.weight differs from model.embed_tokens.weight, but the model ties them")
        return len(self.named)

    def copy_from(self, given: Mapping[str, torch.Tensor]) -> int:
        """Check, then take all tensors over; returns how many. Converts to the engine's dtype."""
        num_matched = self.check(given)
        with torch.no_grad():
            for name, own in self.named.items():
                own.copy_(given[name])
        return num_matched

    def _layer(self, prefix: str) -> Layer:
        shape = self.shape
        q, kv, hidden, inner = (
            shape.num_heads * shape.head_dim,
            shape.num_kv_heads * shape.head_dim,
            shape.hidden_size,
            shape.intermediate_size,
        )
        attention = prefix + "self_attn."
        qkv_names = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        mlp_names = {"gate_proj": inner, "up_proj": inner}
        return Layer(
            input_norm=self._add(prefix + "input_layernorm.weight", hidden),
            qkv=self._fuse(attention, qkv_names, "weight", hidden),
            qkv_bias=self._fuse(attention, qkv_names, "bias") if shape.has_qkv_bias else None,
            q_norm=self._add(attention + "q_norm.weight", shape.head_dim) if shape.has_qk_norm else None,
            k_norm=self._add(attention + "k_norm.weight", shape.head_dim) if shape.has_qk_norm else None,
            output=self._fuse(attention, {"o_proj": hidden}, "weight", q),
            output_bias=self._add(attention + "o_proj.bias", hidden) if shape.has_output_bias else None,
            mlp_norm=self._add(prefix + "post_attention_layernorm.weight", hidden),
            gate_up=self._fuse(prefix + "mlp.", mlp_names, "weight", hidden),
            gate_up_bias=self._fuse(prefix + "mlp.", mlp_names, "bias") if shape.has_mlp_bias else None,
            down=self._fuse(prefix + "mlp.", {"down_proj": hidden}, "weight", inner),
            down_bias=self._add(prefix + "mlp.down_proj.bias", hidden) if shape.has_mlp_bias else None,
        )

    def _add(self, name: str, *size: int) -> torch.Tensor:
        tensor = torch.empty(size, dtype=self._dtype, device=self._device)
        self.named[name] = tensor
        return tensor

    def _fuse(self, prefix: str, rows_of: dict[str, int], kind: str, *columns: int) -> torch.Tensor:
        fused = torch.empty((sum(rows_of.values()), *columns), dtype=self._dtype, device=self._device)
        start = 0
        for name, rows in rows_of.items():
            self.named[f"{prefix}{name}.{kind}"] = fused[start : start + rows]
            start += rows
        return fused


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
        weights = Weights(shape, dtype=dtype, device=device)
        weights.copy_from({name: tensor for name, tensor in given.items() if not name.endswith("rotary_emb.inv_freq")})
    except (OSError, SafetensorError, WeightSyncError) as error:
        raise EngineError(f"model {model_path}: {error}") from error
    return weights
