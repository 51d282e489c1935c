"""`psrl prepare retool_tiny`: makes the cold-started model again. Not needed to train: the package ships it."""

from __future__ import annotations

from pathlib import Path

from psrl.recipes.retool_tiny.cold_start import MODEL, SFT


def prepare(source: Path | None = None, output: Path | None = None, *, num_steps: int = SFT.num_steps) -> Path:
    """Write tokenizer and weights to `output`, a Hugging Face folder, and return it.

    Raises:
        ConfigError: A source was given; everything is made from a seed.
    """
    return MODEL.prepare("retool_tiny", source, output, num_steps=num_steps)
