"""Rows of others become rows of psrl, whole or not at all."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from psrl.config.data import DataConfig
from psrl.datasets.source import build_source
from psrl.errors import ConfigError
from psrl.recipes.gsm8k.prepare import prepare as prepare_gsm8k
from psrl.recipes.questions import find_file, question_of, read_questions
from psrl.recipes.retool.prepare import prepare as prepare_retool

ROWS = Path(__file__).parent / "rows"
"""The first rows of GSM8K (MIT license) and AIME 2024, as they are published."""


def rows_of_gsm8k(folder):
    for part in ("train", "test"):
        (folder / f"gsm8k_{part}.jsonl").symlink_to(ROWS / f"gsm8k_{part}.jsonl")
    return folder


def source_of(output):
    data = DataConfig(train_files=[str(output / "train.jsonl")], val_files=[str(output / "test.jsonl")], shuffle=False)
    return build_source(data, prompt_tokens=lambda task: 1)


@pytest.mark.parametrize("prepare", [prepare_retool, prepare_gsm8k])
def test_gsm8k_is_converted_whole_and_read_as_tasks(tmp_path, prepare):
    source = source_of(prepare(rows_of_gsm8k(tmp_path), tmp_path / "out", with_model=False))
    assert (source.report.num_train, source.report.num_val, source.report.bad_row_counts) == (40, 20, {})
    first = source.next_tasks(1)[0]
    assert first.prompt[-1].content.startswith("Natalia sold clips to 48 of her friends in April")
    assert (first.ground_truth, first.data_source) == ("72", "openai/gsm8k")
    assert r"\boxed{}" in first.prompt[0].content


def test_aime_rows_are_read_in_their_own_shape():
    questions = list(read_questions(ROWS / "aime24.jsonl"))
    assert questions[0].text.startswith("Find the number of ways to place a digit")
    assert (questions[0].answer, questions[0].data_source) == ("45", "aime")


def test_thousands_and_negative_answers_are_plain_numbers():
    rows = [{"question": "q", "answer": f"work\n#### {answer}"} for answer in ("1,018", "-5", "0.5", "18 ")]
    assert [question_of(raw, source="f", row=0).answer for raw in rows] == ["1018", "-5", "0.5", "18"]


def test_parquet_of_the_same_rows_gives_the_same_output(tmp_path):
    rows = [{"question": f"q{index}", "answer": f"#### {index}"} for index in range(5)]
    for part in ("train", "test"):
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{part}-00000-of-00001.parquet")
    output = prepare_gsm8k(tmp_path, tmp_path / "out", with_model=False)
    written = [json.loads(line) for line in (output / "train.jsonl").read_text().splitlines()]
    assert [row["reward_model"]["ground_truth"] for row in written] == ["0", "1", "2", "3", "4"]


def test_a_row_of_another_shape_is_named_and_nothing_is_written(tmp_path):
    source = tmp_path / "rows.jsonl"
    source.write_text('{"question": "q", "answer": "no number"}\n{"text": "t"}\n{"question": "q", "answer": "#### 1"}\n')
    with pytest.raises(ConfigError) as caught:
        prepare_gsm8k(source, tmp_path / "out", with_model=False)
    assert "rows.jsonl row 0: no_answer" in str(caught.value)
    assert "rows.jsonl row 1: unknown_shape" in str(caught.value)
    assert not (tmp_path / "out" / "train.jsonl").exists()


def test_without_rows_the_user_is_told_what_to_give():
    with pytest.raises(ConfigError, match="--source FOLDER"):
        prepare_gsm8k(None, None, with_model=False)


def test_a_folder_with_two_training_files_is_refused(tmp_path):
    for name in ("train_a.jsonl", "train_b.jsonl"):
        (tmp_path / name).write_text("")
    with pytest.raises(ConfigError, match=r"found: train_a\.jsonl, train_b\.jsonl"):
        find_file(tmp_path, "train")
