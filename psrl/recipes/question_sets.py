"""Sets of questions, from files or the hub to the rows that psrl trains on and validates with.

Invariant: all or nothing is written; a question stands in a set once, and in no training set that is also in a validation set beside
it; every reference answer is right by the recipe's own scorer. What was left out is counted, and named in `left_out.jsonl`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psrl.datasets.rows import named, read_raw_rows
from psrl.errors import ConfigError, RowError
from psrl.recipes.gold_answers import ungradable
from psrl.recipes.published_rows import ENDINGS, rows_of_hub
from psrl.recipes.questions import GSM8K, Question, question_of
from psrl.recipes.row_files import write_left_out, write_rows

MAX_LEFT_OUT_SHARE = 0.01
"""Of a set's questions; beyond, something else is wrong with it. A benchmark of 30 may lose none."""
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.parquet$")


@dataclass(frozen=True, kw_only=True, slots=True)
class QuestionSet:
    """A set that a recipe knows."""

    name: str
    """Of the file that is written."""
    pattern: str
    """Of the names of its files, lower case; the first set whose pattern is found has the file."""
    is_training: bool
    data_source: str
    """Of rows that do not say theirs; validation tells accuracies by it."""
    hub: str
    """Its name on the hub."""
    hub_names: tuple[str, ...]
    """Short names of `--hub`."""
    split: str = "train"
    subset: str | None = None


DAPO = QuestionSet(
    name="dapo_math_17k",
    pattern=r"dapo",
    is_training=True,
    data_source="math_dapo",
    hub="BytedTsinghua-SIA/DAPO-Math-17k",
    hub_names=("dapo",),
)
AIME_2024 = QuestionSet(
    name="aime_2024",
    pattern=r"aime.*24",
    is_training=False,
    data_source="aime_2024",
    hub="Maxwell-Jia/AIME_2024",
    hub_names=("aime_2024",),
)
AIME_2025 = QuestionSet(
    name="aime_2025",
    pattern=r"aime.*25",
    is_training=False,
    data_source="aime_2025",
    hub="yentinglin/aime_2025",
    hub_names=("aime_2025",),
)
TRAIN = QuestionSet(
    name="train", pattern=r"train", is_training=True, data_source="questions", hub=GSM8K, hub_names=("gsm8k",), subset="main"
)
TEST = QuestionSet(
    name="test", pattern=r"test", is_training=False, data_source="questions", hub=GSM8K, hub_names=("gsm8k",), split="test", subset="main"
)


@dataclass(kw_only=True, slots=True)
class _Read:
    """What came of one set."""

    questions: list[Question] = field(default_factory=list)
    places: list[tuple[str, int]] = field(default_factory=list)
    """File and row of each question."""
    num_duplicates: int = 0
    left_out: list[RowError] = field(default_factory=list)


def write_question_sets(
    folder: Path, source: Path | None, hub: str | None, *, known: Sequence[QuestionSet], system_text: str, reward_name: str
) -> list[Path]:
    """Write a JSONL file below `folder` for every set that is found, and return them.

    Args:
        folder: Where to write.
        source: A folder with files of the known sets, or one file; one that is of no set is `train` and `test` alike, as it is.
        hub: Instead: short or full names of sets on the hub, with commas between.
        known: In the order in which file names are compared with their patterns.
        system_text: First message of every prompt.
        reward_name: The scorer by which every reference answer must be right.

    Raises:
        ConfigError: Both places or neither are named, nothing is found, rows cannot be read (they are named), or too many must be left out.
    """
    if source is not None and hub is not None:
        raise ConfigError(key="--hub", value=hub, rule="stands beside --source", fix="leave one of them out")
    rows = _rows_of_hub(hub, known) if hub is not None else _rows_of_files(source, known, but=folder)
    read: dict[str, _Read] = {}
    for_validation: set[str] = set()
    is_one_file = source is not None and source.is_file()
    for question_set in sorted(rows, key=lambda each: each.is_training):
        found = _read(question_set, rows[question_set], for_validation)
        _leave_out_ungradable(question_set, found, reward_name)
        read[question_set.name] = found
        if not question_set.is_training and not is_one_file:
            for_validation |= {_key(question.text) for question in found.questions}
    files = {folder / f"{name}.jsonl": found for name, found in read.items()}
    write_rows({file: [_row_of(each, at, system_text) for at, each in enumerate(found.questions)] for file, found in files.items()})
    for file, found in files.items():
        _tell(file, found)
    left_out = [error for found in read.values() for error in found.left_out]
    named_in = write_left_out(folder, left_out)
    if left_out:
        print(f"what was left out is named in {named_in}")
    return list(files)


def _rows_of_files(source: Path | None, known: Sequence[QuestionSet], *, but: Path) -> dict[QuestionSet, Iterator[tuple[str, int, Any]]]:
    if source is None:
        fix = "give --source FOLDER with " + ", ".join(f"*{each.name}*" for each in known) + " (.jsonl or .parquet), or --hub NAME"
        raise ConfigError(key="--source", value=None, rule="the rows must come from somewhere", fix=fix)
    if source.is_file():
        own = _set_of(source.name, known)
        parts = [own] if own is not None else [each for each in known if each in (TRAIN, TEST)]
        return {part: _rows([source]) for part in parts}
    files: dict[QuestionSet, list[Path]] = {}
    for path in sorted(path for path in source.rglob("*") if path.suffix in ENDINGS and path.is_file()):
        if path.resolve().is_relative_to(but.resolve()):  # what was written before
            continue
        of = _set_of(str(path.relative_to(source)), known)
        if of is not None:
            files.setdefault(of, []).append(path)
    for question_set, paths in files.items():
        if len(paths) > 1 and not all(_SHARD.search(path.name) for path in paths):
            names = ", ".join(path.name for path in paths)
            rule = f"has several files of the set {question_set.name}, found: {names}"
            raise ConfigError(key="--source", value=str(source), rule=rule, fix="leave one of them, or name the file itself")
    if not files:
        rule = "holds no file whose name holds " + " or ".join(repr(each.pattern) for each in known)
        raise ConfigError(key="--source", value=str(source), rule=rule, fix="put .jsonl or .parquet files of such a name there")
    return {question_set: _rows(paths) for question_set, paths in files.items()}


def _rows_of_hub(hub: str, known: Sequence[QuestionSet]) -> dict[QuestionSet, Iterator[tuple[str, int, Any]]]:
    rows: dict[QuestionSet, Iterator[tuple[str, int, Any]]] = {}
    for name in filter(None, (part.strip() for part in hub.split(","))):
        meant = [each for each in known if name in each.hub_names or name == each.hub]
        if not meant:
            own = _set_of(name, known) if "/" in name else None
            if own is None:
                short = ", ".join(dict.fromkeys(short for each in known for short in each.hub_names))
                fix = f"use {short}, or a full name that holds the name of one of these sets"
                raise ConfigError(key="--hub", value=name, rule="is no set of questions that this recipe knows", fix=fix)
            rows[own] = rows_of_hub(name, split="train")
        for each in meant:
            rows[each] = rows_of_hub(each.hub, split=each.split, subset=each.subset)
    if not rows:
        raise ConfigError(key="--hub", value=hub, rule="names no set", fix=f"such as --hub {known[0].hub_names[0]}")
    return rows


def _set_of(name: str, known: Sequence[QuestionSet]) -> QuestionSet | None:
    return next((each for each in known if re.search(each.pattern, name.lower())), None)


def _rows(paths: Iterable[Path]) -> Iterator[tuple[str, int, Any]]:
    for path in paths:
        for row, raw in enumerate(read_raw_rows(str(path), key="--source")):
            yield path.name, row, raw


def _read(question_set: QuestionSet, rows: Iterator[tuple[str, int, Any]], for_validation: set[str]) -> _Read:
    found, bad = _Read(), list[RowError]()
    answers: dict[str, str] = {}
    file = question_set.name
    for file, row, raw in rows:
        try:
            question = question_of(raw, source=file, row=row, data_source=question_set.data_source)
        except RowError as error:
            bad.append(error)
            continue
        key = _key(question.text)
        if key not in answers:
            answers[key] = question.answer
            if question_set.is_training and key in for_validation:
                detail = "the same question is in a validation set"
                found.left_out.append(RowError(source=file, row=row, reason="in_validation", detail=detail))
            else:
                found.questions.append(question)
                found.places.append((file, row))
        elif answers[key] == question.answer:
            found.num_duplicates += 1
        else:
            detail = f"answer {question.answer!r}, and {answers[key]!r} for the same question before"
            found.left_out.append(RowError(source=file, row=row, reason="another_answer", detail=detail))
    if bad or not found.questions:
        rule = f"{len(bad)} rows cannot be used: {named(bad)}" if bad else "holds no question"
        if found.left_out:
            rule = f"holds no question but {len(found.left_out)} that are left out: {named(found.left_out)}"
        raise ConfigError(key="--source", value=file, rule=rule, fix="correct these rows")
    return found


def _leave_out_ungradable(question_set: QuestionSet, found: _Read, reward_name: str) -> None:
    reasons = ungradable(found.questions, reward_name=reward_name)
    for position, why in reasons.items():
        file, row = found.places[position]
        found.left_out.append(RowError(source=file, row=row, reason="gold_is_wrong", detail=why))
    wrong = [error for error in found.left_out if error.reason != "in_validation"]
    if len(wrong) > MAX_LEFT_OUT_SHARE * len(found.questions):
        rule = f"{len(wrong)} of the {len(found.questions)} questions of {question_set.name} would be left out: {named(wrong)}"
        raise ConfigError(key="--source", value=question_set.name, rule=rule, fix="correct these rows")
    found.questions = [question for position, question in enumerate(found.questions) if position not in reasons]


def _row_of(question: Question, position: int, system_text: str) -> dict[str, Any]:
    return {
        "prompt": [{"role": "system", "content": system_text}, {"role": "user", "content": question.text}],
        "data_source": question.data_source,
        "reward_model": {"style": "rule", "ground_truth": question.answer},
        "extra_info": {"index": position if question.index is None else question.index},
    }


def _tell(file: Path, found: _Read) -> None:
    beside = f"; {found.num_duplicates} duplicates, {len(found.left_out)} left out" if found.num_duplicates or found.left_out else ""
    print(f"{len(found.questions)} rows written to {file}{beside}")


def _key(text: str) -> str:
    return " ".join(text.split())
