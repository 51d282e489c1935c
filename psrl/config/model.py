"""`model`: which weights and tokenizer are trained."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class ModelConfig:
    """A Hugging Face folder on this machine."""

    path: str = "???"
    """Folder with config.json, weights and tokenizer; `${package:recipes/...}` names one that psrl ships."""
    tokenizer_path: str | None = None
    """Folder of the tokenizer where it is not the model's own."""
    dtype: str = "float32"
    """`float32` or `bfloat16`, of parameters in training and in the torch engine."""
    history_thinking: str = "keep"
    """What happens to reasoning of earlier turns: `keep` or `strip` (strip makes branches)."""
