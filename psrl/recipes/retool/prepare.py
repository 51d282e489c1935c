"""`psrl prepare retool`: questions to train on and to validate with, demonstrations for the cold start, and a small model to try it."""

from __future__ import annotations

from pathlib import Path

from psrl.recipes.question_sets import AIME_2024, AIME_2025, DAPO, TEST, TRAIN, write_question_sets
from psrl.recipes.retool.demonstrations import write_demonstrations
from psrl.recipes.retool.smollm2 import make_smollm2_folder

DEFAULT_OUTPUT = Path("data/retool")
MODEL_FOLDER = "SmolLM2-135M-Instruct"
SYSTEM_TEXT = (
    "Solve the problem step by step. You may run Python with the tool code_interpreter to calculate or to check; "
    "print what you want to see. End with the final answer in \\boxed{}."
)
SETS = (DAPO, AIME_2024, AIME_2025, TRAIN, TEST)


def prepare(
    source: Path | None = None, output: Path | None = None, *, hub: str | None = None, sft: str | None = None, with_model: bool = True
) -> Path:
    """Write questions, demonstrations and model below `output`, and return that folder.

    Args:
        source: Folder with files named after *dapo*, *aime*24*, *aime*25*, *train*, *test* (JSONL or Parquet), or one file.
        output: Where to write; `data/retool` if not given, which is where the settings look.
        hub: Instead of `source`: sets of the hub with commas between, of `dapo`, `aime_2024`, `aime_2025`, `gsm8k`.
        sft: Rows of ReTool-SFT: a file, a folder, or its name on the hub (`JoeYing/ReTool-SFT`).
        with_model: False leaves the model out, for those who bring their own.

    Raises:
        ConfigError: No rows, rows of an unknown shape, answers that cannot be graded, or the model's wheel is missing.
    """
    folder = output or DEFAULT_OUTPUT
    if source is not None or hub is not None or sft is None:
        write_question_sets(folder, source, hub, known=SETS, system_text=SYSTEM_TEXT, reward_name="retool")
    if sft is not None:
        write_demonstrations(folder / "sft.jsonl", sft, system_text=SYSTEM_TEXT)
    if with_model:
        print(f"model written to {make_smollm2_folder(folder / MODEL_FOLDER)}")
    return folder
