"""A plain Hugging Face folder of the trained weights: config.json, generation_config.json, safetensors, the tokenizer's files.

The folder appears whole or not at all. Where an adapter was trained, the weights are merged and `adapter/` holds it as peft reads it.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate import init_empty_weights
from safetensors.torch import save_file
from torch import Tensor

from psrl.errors import CheckpointError
from psrl.training.model import PolicyModel

if TYPE_CHECKING:
    from peft import LoraConfig

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)


ADAPTER_FOLDER = "adapter"


@dataclass(frozen=True, slots=True)
class Adapter:
    """What was trained of a model with an adapter."""

    config: LoraConfig
    tensors: Mapping[str, Tensor]
    """By peft's names."""


def save_hf_folder(
    model: PolicyModel,
    tensors: Mapping[str, Tensor],
    path: str | Path,
    *,
    source: str | Path | None = None,
    adapter: Adapter | None = None,
) -> None:
    """Write `tensors` (as `named_full_tensors` gives them) with the model's config; an older folder at `path` is replaced.

    `source` is the folder whose tokenizer files are copied, those that there are.

    Raises:
        CheckpointError: The disk refused.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        _save_model(model, tensors, temporary)
        if adapter is not None:
            adapter.config.save_pretrained(str(temporary / ADAPTER_FOLDER))
            save_file(dict(adapter.tensors), temporary / ADAPTER_FOLDER / "adapter_model.safetensors", metadata={"format": "pt"})
        copied = [Path(source) / name for name in TOKENIZER_FILES] if source is not None else []
        for file in copied:
            if file.is_file():
                shutil.copyfile(file, temporary / file.name)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    except OSError as error:
        raise CheckpointError(f"cannot write the model folder {target}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _save_model(model: PolicyModel, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """By an empty model of the same architecture, without the adapters and divided tensors that the trained one may have."""
    config = copy.deepcopy(model.causal_lm.config)
    with init_empty_weights():
        plain = type(model.causal_lm)(config).to(next(iter(tensors.values())).dtype)
    plain.generation_config = model.causal_lm.generation_config
    plain.save_pretrained(folder, state_dict=dict(tensors))
