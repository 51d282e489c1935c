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

SHAPES_FOLDER = Path(__file__).parent / "model_shapes"
"""config.json of models that the shipped cluster configurations name, by the folder's name."""
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
    intermediate_size: int
    num_heads: int
    has_qk_norm: bool
    """Queries and keys are normalised, as in Qwen3."""

    @property
    def query_width(self) -> int:
        """Of all heads."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Of all key-value heads."""
        return self.num_kv_heads * self.head_dim


def read_model_size(path: str) -> ModelSize:
    """Size of a Hugging Face folder, from config.json and the safetensors headers (weights are not read).

    A folder that is not on this machine, which only a plan of described nodes may name, has the config.json of `model_shapes/`.

    Raises:
        ConfigError: config.json cannot be read or lacks a number.
    """
    folder = Path(path)
    key = "train_actor_rollout_ref.model.path"
    try:
        content = json.loads(_config_of(folder).read_text())
        layers, hidden, heads = content["num_hidden_layers"], content["hidden_size"], content["num_attention_heads"]
        vocab = content["vocab_size"]
    except (OSError, ValueError, KeyError) as error:
        rule = f"config.json cannot be used ({type(error).__name__}: {error})"
        raise ConfigError(key=key, value=path, rule=rule, fix="name the folder of a Hugging Face causal language model") from error
    width = content["head_dim"] if content.get("head_dim") else hidden // heads
    kv_heads = content["num_key_value_heads"] if content.get("num_key_value_heads") else heads
    counted = sum(_safetensors_elements(file) for file in folder.glob("*.safetensors"))
    return ModelSize(
        num_parameters=counted or _parameters_of(content, heads_width=heads * width, kv_width=kv_heads * width),
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_dim=width,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=content["intermediate_size"] if "intermediate_size" in content else 4 * hidden,
        num_heads=heads,
        has_qk_norm="model_type" in content and content["model_type"].startswith("qwen3"),
    )


def kv_cache_bytes(size: ModelSize, *, num_slots: int, num_tokens: int, dtype: str) -> int:
    """Keys and values of every slot: 2 * L * K * D numbers per token.

    Example:
        2 layers, 2 heads of width 8, 4 slots of 100 tokens in float32: 2 * 2 * 2 * 8 * 4 * 100 * 4 bytes = 102,400.
    """
    return 2 * size.num_layers * size.num_kv_heads * size.head_dim * num_slots * num_tokens * DTYPE_BYTES[dtype]


def _config_of(folder: Path) -> Path:
    known = SHAPES_FOLDER / f"{folder.name}.json"
    return known if not folder.is_dir() and known.is_file() else folder / "config.json"


def _parameters_of(content: dict[str, Any], *, heads_width: int, kv_width: int) -> int:
    """Of a model whose weights are not here: embeddings, attention, gated feed-forward. Norms and biases are left out.

    Example:
        Qwen2.5-7B: 2 x 152,064 x 3,584 + 28 x (2 x 3,584 x 3,584 + 2 x 3,584 x 512 + 3 x 3,584 x 18,944) = 7.6e9.
    """
    vocab, hidden, layers = content["vocab_size"], content["hidden_size"], content["num_hidden_layers"]
    if "intermediate_size" not in content:
        return int(vocab * hidden + 12 * layers * hidden * hidden)  # the classic transformer
    is_tied = "tie_word_embeddings" in content and content["tie_word_embeddings"]
    block = 2 * hidden * heads_width + 2 * hidden * kv_width + 3 * hidden * content["intermediate_size"]
    return int(vocab * hidden * (1 if is_tied else 2) + layers * block)


def _safetensors_elements(path: Path) -> int:
    """Elements of a safetensors file: an 8-byte little-endian header length, then JSON."""
    with path.open("rb") as file:
        header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
