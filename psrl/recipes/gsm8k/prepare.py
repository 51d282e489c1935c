"""`psrl prepare gsm8k --source FOLDER`: rows of GSM8K for one turn, and SmolLM2-135M-Instruct as a plain model folder."""

from __future__ import annotations

from pathlib import Path

from psrl.recipes.retool.prepare import write_rows_and_model

DEFAULT_OUTPUT = Path("data/gsm8k")
SYSTEM_TEXT = "Solve the problem step by step. End with the final answer in \\boxed{}."


def prepare(source: Path | None = None, output: Path | None = None, *, with_model: bool = True) -> Path:
    """Write train.jsonl, test.jsonl and the model below `output`, and return that folder; arguments as in `retool`.

    Raises:
        ConfigError: No rows, rows of an unknown shape, or the model's wheel is missing.
    """
    return write_rows_and_model(output or DEFAULT_OUTPUT, source, system_text=SYSTEM_TEXT, with_model=with_model)
