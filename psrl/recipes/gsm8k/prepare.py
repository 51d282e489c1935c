"""`psrl prepare gsm8k --source FOLDER`: rows of GSM8K for one turn, and SmolLM2-135M-Instruct as a plain model folder."""

from __future__ import annotations

from pathlib import Path

from psrl.recipes.questions import find_file, read_questions, write_rows
from psrl.recipes.retool.prepare import MODEL_FOLDER
from psrl.recipes.retool.smollm2 import make_smollm2_folder

DEFAULT_OUTPUT = Path("data/gsm8k")
SYSTEM_TEXT = "Solve the problem step by step. End with the final answer in \\boxed{}."


def prepare(source: Path | None = None, output: Path | None = None, *, with_model: bool = True) -> Path:
    """Write train.jsonl, test.jsonl and the model below `output`, and return that folder; arguments as in `retool`.

    Raises:
        ConfigError: No rows, rows of an unknown shape, or the model's wheel is missing.
    """
    folder = output or DEFAULT_OUTPUT
    for part in ("train", "test"):
        file = folder / f"{part}.jsonl"
        count = write_rows(file, read_questions(find_file(source, part)), system_text=SYSTEM_TEXT)
        print(f"{count} rows written to {file}")
    if with_model:
        print(f"model written to {make_smollm2_folder(folder / MODEL_FOLDER)}")
    return folder
