"""`psrl prepare gsm8k`: rows of GSM8K for one turn, and SmolLM2-135M-Instruct as a plain model folder."""

from __future__ import annotations

from pathlib import Path

from psrl.recipes.question_sets import TEST, TRAIN, write_question_sets
from psrl.recipes.retool.prepare import MODEL_FOLDER
from psrl.recipes.retool.smollm2 import make_smollm2_folder

DEFAULT_OUTPUT = Path("data/gsm8k")
SYSTEM_TEXT = "Solve the problem step by step. End with the final answer in \\boxed{}."


def prepare(source: Path | None = None, output: Path | None = None, *, hub: str | None = None, with_model: bool = True) -> Path:
    """Write train.jsonl, test.jsonl and the model below `output`, and return that folder.

    Args:
        source: Folder with one *train* and one *test* file (JSONL or Parquet), or one file for both.
        output: Where to write; `data/gsm8k` if not given, which is where config.yaml looks.
        hub: Instead of `source`: `gsm8k`.
        with_model: False leaves the model out, for those who bring their own.

    Raises:
        ConfigError: No rows, rows of an unknown shape, answers that cannot be graded, or the model's wheel is missing.
    """
    folder = output or DEFAULT_OUTPUT
    write_question_sets(folder, source, hub, known=(TRAIN, TEST), system_text=SYSTEM_TEXT, reward_name="math_answer")
    if with_model:
        print(f"model written to {make_smollm2_folder(folder / MODEL_FOLDER)}")
    return folder
