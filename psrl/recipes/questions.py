"""Question-and-answer rows as others publish them, to rows that psrl trains on.

Two shapes are known: GSM8K (`question`, and an `answer` that ends with `#### 18`) and AIME (`input`, `output`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from psrl.datasets.rows import named, read_raw_rows
from psrl.errors import ConfigError, RowError

_GSM8K_ANSWER = re.compile(r"####\s*(-?[\d,]*\.?\d+)\s*$")
ENDINGS = (".parquet", ".jsonl", ".json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One row, whatever its shape was."""

    text: str
    answer: str
    data_source: str


def question_of(raw: Any, *, source: str, row: int) -> Question:
    """Read one row.

    Raises:
        RowError: Reasons: `unknown_shape`, `no_answer`.

    Example:
        {"question": "...", "answer": "... #### 1,018"} has the answer "1018".
    """
    if isinstance(raw, Mapping) and isinstance(raw.get("question"), str) and isinstance(raw.get("answer"), str):
        match = _GSM8K_ANSWER.search(raw["answer"])
        if match is None:
            raise RowError(source=source, row=row, reason="no_answer", detail=f"does not end with '#### <number>': {raw['answer'][-60:]!r}")
        return Question(text=raw["question"], answer=match[1].replace(",", ""), data_source="openai/gsm8k")
    if isinstance(raw, Mapping) and isinstance(raw.get("input"), str) and raw.get("output") is not None:
        return Question(text=raw["input"], answer=str(raw["output"]).strip(), data_source="aime")
    shape = sorted(raw) if isinstance(raw, Mapping) else type(raw).__name__
    raise RowError(source=source, row=row, reason="unknown_shape", detail=f"neither question/answer nor input/output: {shape}")


def read_questions(file: Path) -> Iterator[Question]:
    """All questions of a file.

    Raises:
        ConfigError: The file cannot be read, or a row has no known shape; rows are named.
    """
    bad: list[RowError] = []
    for row, raw in enumerate(read_raw_rows(str(file), key="--source")):
        try:
            yield question_of(raw, source=file.name, row=row)
        except RowError as error:
            bad.append(error)
    if bad:
        raise ConfigError(key="--source", value=str(file), rule=f"{len(bad)} rows cannot be used: {named(bad)}", fix="correct these rows")


def find_file(source: Path | None, part: str) -> Path:
    """The file of `source` (a folder, or one file for every part) whose name holds `part`, such as `train`.

    Raises:
        ConfigError: There is none, or more than one.
    """
    if source is None:
        rule = "the rows must be on this machine"
        raise ConfigError(
            key="--source", value=None, rule=rule, fix="give --source FOLDER with *train*.jsonl and *test*.jsonl (or .parquet)"
        )
    if source.is_file():
        return source
    found = sorted(path for path in source.rglob("*") if path.suffix in ENDINGS and part in path.name)
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        fix = f"leave one file with {part!r} in its name (.parquet or .jsonl), or name the file itself"
        raise ConfigError(key="--source", value=str(source), rule=f"needs exactly one file of {part!r}, found: {names}", fix=fix)
    return found[0]


def write_rows(output: Path, questions: Iterable[Question], *, system_text: str) -> int:
    """Write the JSONL that `data.train_files` reads, and return how many rows it has. The file appears whole or not at all."""
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_suffix(".unfinished")
    count = 0
    with unfinished.open("w", encoding="utf-8") as lines:
        for index, question in enumerate(questions):
            row = {
                "prompt": [{"role": "system", "content": system_text}, {"role": "user", "content": question.text}],
                "data_source": question.data_source,
                "reward_model": {"style": "rule", "ground_truth": question.answer},
                "extra_info": {"index": index},
            }
            lines.write(json.dumps(row, ensure_ascii=False) + "\n")
            count += 1
    unfinished.rename(output)
    return count
