"""Rows become tasks as verl's users wrote them, or are refused with a reason."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from psrl.datasets.rows import load_rows, read_raw_rows
from psrl.errors import ConfigError
from psrl.types import Role

VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 7},
    "agent_name": "multi_turn_agent",
    "env_class": "my.Env",
    "data_class": "my.Data",
}
USER = [{"role": "user", "content": "Hi"}]


def write_jsonl(path: Path, rows) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(file, **options):
    return load_rows([file], **{"prompt_key": "prompt", "max_bad_rows": 0, "partition": "train", **options})


def check_verl_task(task):
    assert task.uid == "train-0"
    assert [(message.role, message.content) for message in task.prompt] == [(Role.SYSTEM, "Be brief."), (Role.USER, "What is 2 + 2?")]
    assert (task.data_source, task.ground_truth, task.agent_name) == ("openai/gsm8k", "4", "multi_turn_agent")
    assert (task.env_class, task.data_class) == ("my.Env", "my.Data")
    assert task.extra_info == {"split": "train", "index": 7, "ability": "math"}


def test_a_jsonl_row_of_verl_is_read_as_it_is(tmp_path):
    check_verl_task(load(write_jsonl(tmp_path / "rows.jsonl", [VERL_ROW])).tasks[0])


def test_a_parquet_row_of_verl_is_read_as_it_is(tmp_path):
    pq.write_table(pa.Table.from_pylist([VERL_ROW]), tmp_path / "rows.parquet")
    check_verl_task(load(str(tmp_path / "rows.parquet")).tasks[0])


def test_optional_columns_may_be_absent_or_null(tmp_path):
    rows = [{"prompt": USER}, {"prompt": USER, "reward_model": None, "extra_info": None, "agent_name": None}]
    tasks = load(write_jsonl(tmp_path / "rows.jsonl", rows)).tasks
    assert [(task.ground_truth, task.extra_info, task.agent_name, task.data_source) for task in tasks] == [(None, {}, None, "unknown")] * 2


def test_bad_rows_are_counted_by_reason_and_left_out_where_allowed(tmp_path):
    rows = [
        VERL_ROW,
        "{not json\n",
        "[1, 2]\n",
        {"question": "no prompt"},
        {"prompt": []},
        {"prompt": "text instead of messages"},
        {"prompt": [{"role": "wizard", "content": "x"}]},
        {"prompt": [{"role": "user", "content": None}]},
        {"prompt": ["text"]},
        {"prompt": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}, *USER]},
        {"prompt": [*USER, {"role": "assistant", "content": "done"}]},
        {"prompt": USER, "extra_info": "text"},
        VERL_ROW,
    ]
    loaded = load(write_jsonl(tmp_path / "rows.jsonl", rows), max_bad_rows=11)
    assert loaded.bad_row_counts == {
        "not_json": 1,
        "not_an_object": 1,
        "no_prompt": 3,
        "bad_message": 4,
        "ends_with_assistant": 1,
        "bad_field": 1,
    }
    assert [task.uid for task in loaded.tasks] == ["train-0", "train-12"]


def test_one_bad_row_more_than_allowed_refuses_the_start_and_names_the_rows(tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl", [VERL_ROW, {"prompt": []}, VERL_ROW, "nonsense\n"])
    with pytest.raises(ConfigError) as caught:
        load(file, max_bad_rows=1)
    text = str(caught.value)
    assert "2 of 4 rows" in text
    assert "'no_prompt': 1" in text
    assert f"{file} row 1: no_prompt" in text
    assert f"{file} row 3: not_json" in text
    assert "data.max_bad_rows=2" in text


def test_only_the_first_bad_rows_are_named(tmp_path):
    file = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": []}] * 5000)
    with pytest.raises(ConfigError, match="and 4990 more") as caught:
        load(file)
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [("missing.jsonl", None, "is no file"), ("rows.csv", b"a,b", "ending '.csv'"), ("rows.parquet", b"text", "cannot be read as Parquet")],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path, name, content, rule):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=rule):
        load(str(tmp_path / name))


def test_a_file_without_rows_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no usable row"):
        load(write_jsonl(tmp_path / "rows.jsonl", []))


def test_uids_count_over_all_files(tmp_path):
    files = [write_jsonl(tmp_path / f"{name}.jsonl", [VERL_ROW] * 2) for name in "ab"]
    loaded = load_rows(files, prompt_key="prompt", max_bad_rows=0, partition="val")
    assert [task.uid for task in loaded.tasks] == ["val-0", "val-1", "val-2", "val-3"]


def test_blank_lines_are_no_rows(tmp_path):
    assert len(list(read_raw_rows(write_jsonl(tmp_path / "rows.jsonl", [VERL_ROW, "\n", "  \n", VERL_ROW])))) == 2
