"""`psrl prepare retool --source FOLDER`: rows of GSM8K or AIME, and SmolLM2-135M-Instruct as a plain model folder."""

from __future__ import annotations

from pathlib import Path

from psrl.recipes.questions import find_file, read_questions, write_rows
from psrl.recipes.retool.smollm2 import make_smollm2_folder

DEFAULT_OUTPUT = Path("data/retool")
MODEL_FOLDER = "SmolLM2-135M-Instruct"
SYSTEM_TEXT = (
    "Solve the problem step by step. You may run Python with the tool code_interpreter to calculate or to check; "
    "print what you want to see. End with the final answer in \\boxed{}."
)


def prepare(source: Path | None = None, output: Path | None = None, *, with_model: bool = True) -> Path:
    """Write train.jsonl, test.jsonl and the model below `output`, and return that folder.

    Args:
        source: Folder with one *train* and one *test* file (JSONL or Parquet), or one file for both.
        output: Where to write; `data/retool` if not given, which is where config.yaml looks.
        with_model: False leaves the model out, for those who bring their own.

    Raises:
        ConfigError: No rows, rows of an unknown shape, or the model's wheel is missing.
    """
    return write_rows_and_model(output or DEFAULT_OUTPUT, source, system_text=SYSTEM_TEXT, with_model=with_model)


def write_rows_and_model(folder: Path, source: Path | None, *, system_text: str, with_model: bool) -> Path:
    """What `prepare` does, for every recipe on questions with SmolLM2: train.jsonl, test.jsonl and the model below `folder`."""
    for part in ("train", "test"):
        file = folder / f"{part}.jsonl"
        count = write_rows(file, read_questions(find_file(source, part)), system_text=system_text)
        print(f"{count} rows written to {file}")
    if with_model:
        print(f"model written to {make_smollm2_folder(folder / MODEL_FOLDER)}")
    return folder
