"""How large a model is, from its files; the weights are not read.

Legend: L layers, K key-value heads, D head width.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from psrl.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """What the model's files say of its size."""

    num_parameters: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    hidden_size: int


def read_model_size(path: str) -> ModelSize:
    """Size of a Hugging Face folder, from config.json and the safetensors headers (weights are not read).

    Raises:
        ConfigError: config.json cannot be read or lacks a number.
    """
    folder = Path(path)
    key = "train_actor_rollout_ref.model.path"
    try:
        content = json.loads((folder / "config.json").read_text())
        layers, hidden, heads = content["num_hidden_layers"], content["hidden_size"], content["num_attention_heads"]
        vocab = content["vocab_size"]
    except (OSError, ValueError, KeyError) as error:
        rule = f"config.json cannot be used ({type(error).__name__}: {error})"
        raise ConfigError(key=key, value=path, rule=rule, fix="name the folder of a Hugging Face causal language model") from error
    width = content["head_dim"] if content.get("head_dim") else hidden // heads
    kv_heads = content["num_key_value_heads"] if content.get("num_key_value_heads") else heads
    counted = sum(_safetensors_elements(file) for file in folder.glob("*.safetensors"))
    # Twelve hidden^2 per layer is the classic transformer; only used for models whose weights are not written yet.
    estimate = vocab * hidden + 12 * layers * hidden * hidden
    return ModelSize(
        num_parameters=counted or estimate,
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_dim=width,
        vocab_size=vocab,
        hidden_size=hidden,
    )


def kv_cache_bytes(size: ModelSize, *, num_slots: int, num_tokens: int, dtype: str) -> int:
    """Keys and values of every slot: 2 * L * K * D numbers per token.

    Example:
        2 layers, 2 heads of width 8, 4 slots of 100 tokens in float32: 2 * 2 * 2 * 8 * 4 * 100 * 4 bytes = 102,400.
    """
    return 2 * size.num_layers * size.num_kv_heads * size.head_dim * num_slots * num_tokens * DTYPE_BYTES[dtype]


def _safetensors_elements(path: Path) -> int:
    """Elements of a safetensors file: an 8-byte little-endian header length, then JSON."""
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
