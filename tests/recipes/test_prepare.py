"""Rows of others become rows of psrl, whole or not at all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from psrl.config.data import DataConfig
from psrl.datasets.source import build_source
from psrl.errors import ConfigError
from psrl.recipes.gsm8k.prepare import prepare as prepare_gsm8k
from psrl.recipes.questions import Question, question_of
from psrl.recipes.retool.prepare import prepare as prepare_retool

ROWS = Path(__file__).parent / "rows"
"""The first rows of GSM8K (MIT license), AIME 2024 and DAPO-Math-17k (Apache 2.0), as they are published."""


def rows_of_gsm8k(folder):
    for part in ("train", "test"):
        (folder / f"gsm8k_{part}.jsonl").symlink_to(ROWS / f"gsm8k_{part}.jsonl")
    return folder


def written(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


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


def test_aime_rows_are_read_in_their_own_shape(tmp_path):
    output = prepare_retool(ROWS / "aime24.jsonl", tmp_path, with_model=False)
    assert sorted(path.name for path in output.iterdir()) == ["aime_2024.jsonl"]
    first = written(output / "aime_2024.jsonl")[0]
    assert first["prompt"][1]["content"].startswith("Find the number of ways to place a digit")
    assert (first["reward_model"]["ground_truth"], first["data_source"]) == ("45", "aime_2024")


@pytest.mark.parametrize(
    "raw",
    [
        {"Problem": " q ", "Answer": 204, "ID": "2024-I-1", "Solution": "..."},  # Maxwell-Jia/AIME_2024
        {"problem": "q", "answer": "204", "id": "0", "solution": "..."},  # yentinglin/aime_2025
        {"question": "q", "answer": "204"},  # opencompass/AIME2025
        {"input": "q", "output": "204"},
    ],
)
def test_aime_is_read_in_every_shape_that_it_is_published_in(raw):
    assert question_of(raw, source="f", row=0, data_source="aime_2025") == Question(text="q", answer="204", data_source="aime_2025")


def test_dapo_rows_lose_their_frame_and_their_duplicates_and_keep_their_names(tmp_path):
    rows = [json.loads(line) for line in (ROWS / "dapo_math.jsonl").read_text().splitlines()]
    spaced = json.loads(json.dumps(rows[0]).replace("In triangle", "In  triangle"))
    pq.write_table(pa.Table.from_pylist([*rows * 100, spaced]), tmp_path / "dapo-math-17k.parquet")
    output = prepare_retool(tmp_path, tmp_path / "out", with_model=False)
    found = written(output / "dapo_math_17k.jsonl")
    assert [row["reward_model"]["ground_truth"] for row in found] == ["34", "113", "-3"]
    assert found[0]["extra_info"]["index"] == "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"
    assert found[0]["data_source"] == "math_dapo"
    # The published prompt asks for `Answer: $Answer`; psrl's asks for a box.
    asked = found[0]["prompt"][1]["content"]
    assert asked.startswith("In triangle $ABC$")
    assert asked.endswith("find $a + b + c$.")
    assert [message["role"] for message in found[0]["prompt"]] == ["system", "user"]
    assert not (output / "left_out.jsonl").exists()


def test_a_training_question_that_validation_holds_is_left_out_and_named(tmp_path):
    rows = [{"problem": f"question {number}", "answer": number} for number in range(300)]
    (tmp_path / "dapo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "aime_2024.jsonl").write_text(json.dumps({"problem": "question  7", "answer": 7}) + "\n")
    output = prepare_retool(tmp_path, tmp_path / "out", with_model=False)
    assert len(written(output / "dapo_math_17k.jsonl")) == 299
    assert written(output / "left_out.jsonl") == [
        {"source": "dapo.jsonl", "row": 7, "reason": "in_validation", "detail": "the same question is in a validation set"}
    ]


def test_answers_that_their_own_measure_calls_wrong_are_left_out_and_named_and_many_of_them_refuse_the_set(tmp_path):
    # An unbalanced brace has no box; math-verify finds no mathematics in the second.
    wrong = [{"problem": "brace", "answer": "\\frac{1"}, {"problem": "none", "answer": "\\text{}"}]
    right = [{"problem": f"question {number}", "answer": "\\frac{1}{2}" if number == 3 else str(number)} for number in range(300)]
    source = tmp_path / "rows"
    source.mkdir()
    write = (source / "dapo.jsonl").write_text
    write("".join(json.dumps(row) + "\n" for row in [right[0], *right, *wrong]))  # the first one twice
    output = prepare_retool(source, tmp_path / "out", with_model=False)
    assert len(written(output / "dapo_math_17k.jsonl")) == 300
    left_out = written(output / "left_out.jsonl")
    assert [(row["source"], row["row"], row["reason"]) for row in left_out] == [
        ("dapo.jsonl", 301, "gold_is_wrong"), ("dapo.jsonl", 302, "gold_is_wrong")
    ]  # fmt: skip
    write("".join(json.dumps(row) + "\n" for row in [*right[:50], *wrong]))
    with pytest.raises(ConfigError, match=r"2 of the 52 questions of dapo_math_17k would be left out.*gold_is_wrong"):
        prepare_retool(source, tmp_path / "other", with_model=False)
    assert not (tmp_path / "other").exists()


def test_one_question_with_two_answers_is_not_a_duplicate(tmp_path):
    rows = [{"problem": f"question {number}", "answer": number} for number in range(200)]
    (tmp_path / "dapo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"problem": "question 5", "answer": 6}]))
    output = prepare_retool(tmp_path, tmp_path / "out", with_model=False)
    assert written(output / "left_out.jsonl")[0]["detail"] == "answer '6', and '5' for the same question before"


def test_a_folder_with_everything_gives_a_file_for_each_set(tmp_path):
    for name in ("gsm8k_train.jsonl", "gsm8k_test.jsonl", "aime24.jsonl", "dapo_math.jsonl"):
        (tmp_path / name).symlink_to(ROWS / name)
    output = prepare_retool(tmp_path, tmp_path / "out", with_model=False)
    assert sorted(path.name for path in output.iterdir()) == ["aime_2024.jsonl", "dapo_math_17k.jsonl", "test.jsonl", "train.jsonl"]


@pytest.mark.slow
def test_sets_of_the_hub_come_through_the_datasets_library(tmp_path):
    # The library takes a folder of the set's name for the set, where there is one.
    for name, file in (("BytedTsinghua-SIA/DAPO-Math-17k", "dapo_math.jsonl"), ("Maxwell-Jia/AIME_2024", "aime24.jsonl")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "train.jsonl").write_bytes((ROWS / file).read_bytes())
    environment = {**os.environ, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "1"}
    argv = [sys.executable, "-m", "psrl", "prepare", "retool", "--hub", "dapo,Maxwell-Jia/AIME_2024", "--no-with-model"]
    done = subprocess.run(argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert len(written(tmp_path / "data" / "retool" / "dapo_math_17k.jsonl")) == 3
    assert (tmp_path / "data" / "retool" / "aime_2024.jsonl").is_file()


def test_libraries_of_the_hub_are_not_imported_without_its_name(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom psrl.recipes.retool.prepare import prepare\n"
        f"prepare(Path({str(ROWS / 'aime24.jsonl')!r}), Path({str(tmp_path)!r}), with_model=False)\n"
        "print({'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"hub": "imagenet"}, "use dapo, aime_2024, aime_2025, gsm8k"),
        ({"hub": "owner/imagenet"}, "is no set of questions"),
        ({"hub": "dapo", "source": ROWS}, "stands beside --source"),
        ({"sft": "/nowhere/rows.parquet"}, "is not on this machine"),
    ],
)
def test_a_source_that_is_none_is_refused(tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        prepare_retool(options.pop("source", None), tmp_path, with_model=False, **options)


def test_thousands_and_negative_answers_are_plain_numbers():
    rows = [{"question": "q", "answer": f"work\n#### {answer}"} for answer in ("1,018", "-5", "0.5", "18 ")]
    assert [question_of(raw, source="f", row=0, data_source="d").answer for raw in rows] == ["1018", "-5", "0.5", "18"]


def test_parquet_of_the_same_rows_gives_the_same_output(tmp_path):
    for part in ("train", "test"):
        rows = [{"question": f"{part} q{index}", "answer": f"#### {index}"} for index in range(5)]
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
        prepare_gsm8k(tmp_path, tmp_path / "out", with_model=False)
