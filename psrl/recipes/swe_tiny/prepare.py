"""`psrl prepare swe_tiny`: makes the cold-started model again. Not needed to train: the package ships it."""

from __future__ import annotations

from pathlib import Path

from psrl.errors import ConfigError
from psrl.recipes.swe_tiny.cold_start import MODEL, SFT
from psrl.recipes.tiny_model import show_progress

DEFAULT_OUTPUT = Path("models/swe_tiny")


def prepare(source: Path | None = None, output: Path | None = None, *, num_steps: int = SFT.num_steps) -> Path:
    """Write tokenizer and weights to `output`, a Hugging Face folder, and return it.

    Raises:
        ConfigError: A source was given; everything is made from a seed.
    """
    if source is not None:
        raise ConfigError(key="--source", value=str(source), rule="swe_tiny makes its data itself", fix="leave --source out")
    folder = output or DEFAULT_OUTPUT
    MODEL.make(folder, num_steps=num_steps, on_step=show_progress)
    print(f"model written to {folder}; train with train_actor_rollout_ref.model.path={folder}")
    return folder
