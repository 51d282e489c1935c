"""Which models the torch engine runs, read from a Hugging Face `config.json` without importing transformers."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from psrl.errors import EngineError

SUPPORTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """Shapes and switches of a dense decoder (RMSNorm, RoPE, GQA, SwiGLU)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    has_tied_embeddings: bool
    rope: dict[str, Any]
    """`rope_type`, `rope_theta` and what the type needs."""


def read_architecture(model_path: Path) -> Architecture:
    """Read `config.json`.

    Raises:
        EngineError: No such file, or an architecture or switch that this engine does not run.
    """
    try:
        raw = json.loads((model_path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise EngineError(f"model {model_path}: config.json cannot be read: {error}") from error
    names = raw.get("architectures") or ["(none)"]
    if names[0] not in SUPPORTED:
        raise EngineError(
            f"model {model_path}: architecture {names[0]} is not supported by the torch engine; supported: {', '.join(SUPPORTED)}"
        )
    if raw.get("use_sliding_window") or any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise EngineError(f"model {model_path}: sliding-window attention is not supported by the torch engine")
    if raw.get("hidden_act", "silu") != "silu":
        raise EngineError(f"model {model_path}: hidden_act {raw['hidden_act']!r} is not supported by the torch engine, only 'silu'")
    attention_bias = bool(raw.get("attention_bias", False))
    is_qwen2 = names[0] == "Qwen2ForCausalLM"
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    rope.setdefault("rope_type", rope.get("type", "default"))
    return Architecture(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        rms_norm_eps=raw["rms_norm_eps"],
        max_position_embeddings=raw["max_position_embeddings"],
        has_qkv_bias=attention_bias or is_qwen2,
        has_output_bias=attention_bias and not is_qwen2,
        has_mlp_bias=bool(raw.get("mlp_bias", False)),
        has_qk_norm=names[0] == "Qwen3ForCausalLM",
        has_tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        rope=rope,
    )


def rope_tables(shape: Architecture, *, max_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin, each [max_len, head_dim]: rotated = x * cos + roll(x, head_dim / 2) * sin.

    The first half of sin carries the minus of rotate_half.

    Raises:
        EngineError: A rope type other than default, linear or llama3.
    """
    half = torch.arange(0, shape.head_dim, 2, dtype=torch.float32)
    inverse = 1.0 / (float(shape.rope["rope_theta"]) ** (half / shape.head_dim))
    kind = shape.rope["rope_type"]
    if kind == "linear":
        inverse = inverse / float(shape.rope["factor"])
    elif kind == "llama3":
        inverse = _llama3(inverse, shape.rope)
    elif kind != "default":
        raise EngineError(f"rope_type {kind!r} is not supported by the torch engine; supported: default, linear, llama3")
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), inverse)
    return torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)


def _llama3(inverse: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's scaling: long wavelengths are stretched, short ones kept, those between blended."""
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    old_len = float(rope["original_max_position_embeddings"])
    wavelength = 2 * math.pi / inverse
    smooth = ((old_len / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - smooth) * inverse / factor + smooth * inverse
