"""A plain Hugging Face folder of the trained weights: config.json, generation_config.json, safetensors.

The folder appears whole or not at all. Tokenizer files next to the source weights are copied when there are any.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from psrl.errors import CheckpointError
from psrl.training.model import PolicyModel

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


def save_hf_folder(model: PolicyModel, tensors: Mapping[str, Tensor], path: str | Path, *, source: str | Path | None = None) -> None:
    """Write `tensors` (as `named_full_tensors` gives them) with the model's config; an older folder at `path` is replaced.

    Raises:
        CheckpointError: The disk refused.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        model.causal_lm.save_pretrained(temporary, state_dict=dict(tensors))
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
